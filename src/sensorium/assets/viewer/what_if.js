// "What if" of an episode: its media and prompt are edited, a checkpoint answers again; a map of a picture; a fork.

import { address, ask, counted, h, number, post, s, signed, trouble, verdict } from "./dom.js";

const FULL = 2; // a log-prob that moves by this has the full tint
const MOST_OTHERS = 12;
const WHOLE = [0, 0, 1, 1];
const LABELS = { blank: "blank", crop: "crop", blur: "blur", mute: "mute", drop: "drop frame" };
const CHANGES = { picture: ["blank", "crop", "blur"], video: ["blank", "crop", "blur", "drop", "mute"], sound: ["mute", "blank"] };
const percent = (share) => `${Math.round(100 * share)}`;

export class WhatIf {
  constructor(visit, asked, page, rows) {
    Object.assign(this, { visit, asked, page, rows });
    this.edits = []; // each with words for the page beside what is asked
    this.texts = new Map();
    this.typed = [];
    this.boxes = new Map();
    this.running = null;
    this.element = h("section.what-if", { "aria-label": "what if", tabindex: -1 });
    this.loading = null; // what is offered; none before, and after it failed
    visit.signal.addEventListener("abort", () => this.running?.abort());
  }

  async toggle(place) {
    if (this.element.isConnected) {
      this.running?.abort();
      this.element.remove();
      return;
    }
    place.prepend(this.element);
    this.loading ??= this.load();
    await this.loading;
    this.element.scrollIntoView({ block: "nearest" });
    this.element.focus({ preventScroll: true });
  }

  async load() {
    this.element.replaceChildren(h("p.note", {}, "…"));
    try {
      this.offered = await ask("what_if", this.asked, this.visit.signal);
      await this.findOthers();
      this.build();
    } catch (error) {
      this.loading = null;
      if (error.name !== "AbortError") this.element.replaceChildren(trouble(error));
    }
  }

  build() {
    const { checkpoints, default: usual } = this.offered;
    if (!checkpoints.length) {
      this.element.replaceChildren(trouble("The run has no model to ask: it keeps no checkpoint, and its recipe names no model."));
      return;
    }
    const words = (one) => (one.name === "start" ? `before training: ${one.model}` : `step ${number(one.step)}${one.best ? ", the best" : ""}`);
    this.checkpoint = h("select", { "aria-label": "checkpoint" }, checkpoints.map((one) => h("option", { value: one.name, selected: one.name === usual }, words(one))));
    const turns = this.page.turns;
    this.turn = h("select", { "aria-label": "turn", change: () => this.choose() }, turns.map((turn) => h("option", { value: turn.index }, `turn ${turn.index + 1}`)));
    this.media = h("div.editors");
    this.prompt = h("details", {}, h("summary", {}, "edit the prompt"));
    this.chips = h("div.chips");
    this.sampling = h("select", { "aria-label": "new answer" }, [["greedy", "greedy"], ["sampled", "sampled"], ["none", "none"]].map(([value, name]) => h("option", { value }, name)));
    this.temperature = field("temperature", { value: 1, min: 0.05, max: 10, step: 0.05 });
    this.seed = field("seed", { value: 0, min: 0, max: 2 ** 31 - 1, step: 1 });
    this.length = field("tokens at most", { value: this.offered.usual_new, min: 1, max: this.offered.most_new, step: 1 });
    this.state = h("span.state", { role: "status" });
    this.stop = h("button", { type: "button", hidden: true, click: () => this.running?.abort() }, "cancel");
    this.output = h("div.answered");
    this.forking = h("div.forking");
    this.element.replaceChildren(
      h("header", {}, h("h2", {}, "What if"), h("button", { type: "button", title: "close (w)", "aria-label": "close", click: () => this.toggle() }, "×")),
      h("p.note", {}, "The model is loaded here when it is first asked. Nothing is written to the run."),
      h("div.controls", {}, h("label", {}, "model ", this.checkpoint), turns.length > 1 ? h("label", {}, "at ", this.turn) : ""),
      this.media, this.prompt, this.chips,
      h("div.controls", {}, h("label", {}, "new answer ", this.sampling), this.temperature, this.seed, this.length),
      h("div.controls", {}, h("button.main", { type: "button", click: () => this.answer() }, "Ask"), this.state, this.stop),
      this.output, this.forking);
    this.choose();
  }

  get at() {
    return Number(this.turn.value);
  }

  get before() {
    return { ...this.asked, turn: this.at, checkpoint: this.checkpoint.value };
  }

  /** How a new answer is written; null where a field of it cannot be asked, which is marked. */
  sampled() {
    const drawn = this.sampling.value === "sampled";
    if (!complete(this.length, ...(drawn ? [this.temperature, this.seed] : []))) return null;
    return { max_new_tokens: value(this.length), ...(drawn ? { temperature: value(this.temperature), seed: value(this.seed) } : {}) };
  }

  /** Another turn: what was shown before it can be edited. */
  choose() {
    const { page } = this;
    const seen = new Set();
    for (const message of [...page.head, ...page.turns.filter((turn) => turn.index <= this.at).flatMap((turn) => turn.observation)]) {
      for (const block of message.blocks) if ("medium" in block) seen.add(block.medium);
    }
    const shown = [...seen].slice(-8);
    this.media.replaceChildren(...shown.map((n) => this.editor(n)));
    this.edits = this.edits.filter((edit) => seen.has(edit.asked.medium));
    this.prompt.replaceChildren(this.prompt.firstChild, ...this.offered.texts.filter((text) => text.turn <= this.at).slice(-8).map((text) => this.field(text)));
    this.typed = [];
    this.output.replaceChildren();
    this.showEdits();
    this.showForking();
  }

  editor(n) {
    const medium = this.page.media[n];
    const source = address("api/medium", { ...this.asked, n });
    const box = field("box %", { type: "text", value: "0 0 100 100", title: "left top right bottom; drag over the picture", change: () => this.setBox(n, box.input.value.split(/[\s,]+/).map((one) => Number(one) / 100)) });
    const radius = field("radius", { value: 4, min: 0.5, max: 64, step: 0.5 });
    const from = field("from s", { value: medium.start || 0, min: 0, step: 0.1 });
    const to = field("to s", { value: (medium.start || 0) + 1, min: 0, step: 0.1 });
    const frame = field("frame", { value: 1, min: 1, step: 1 });
    const needed = { blur: [radius], drop: [frame], mute: [from, to] };
    const edit = (change) => () => {
      if (!complete(...(needed[change] ?? []))) return;
      if (change === "mute" && value(to) <= value(from)) return mark(to, "Later than the first second.");
      const asked = { medium: n, change };
      if (["blank", "crop", "blur"].includes(change) && medium.kind !== "sound") asked.box = this.boxes.get(n) ?? WHOLE;
      if (change === "blur") asked.radius = value(radius);
      if (change === "mute") Object.assign(asked, { start: value(from), end: value(to) });
      if (change === "drop") asked.frame = value(frame) - 1;
      this.add(asked, `${LABELS[change]}${asked.box && asked.box !== WHOLE ? ` ${asked.box.map(percent).join(" ")} %` : ""}${change === "mute" ? ` ${asked.start} to ${asked.end} s` : ""}${change === "drop" ? ` ${asked.frame + 1}` : ""}`);
    };
    const buttons = CHANGES[medium.kind].map((change) => h("button", { type: "button", "data-change": change, click: edit(change) }, LABELS[change]));
    const heard = [from, to, ...buttons.filter((button) => button.dataset.change === "mute")];
    for (const one of heard) one.hidden = medium.kind === "video"; // until it is known that the model heard it
    const map = medium.kind === "picture" ? h("button", { type: "button", title: "cover its places one after the other", click: () => this.map(n) }, "map") : "";
    const fields = { picture: [box, radius], video: [box, radius, frame, from, to], sound: [from, to] }[medium.kind];
    const shown = medium.kind === "picture" ? this.canvas(n, h("img", { src: source, alt: `picture ${n + 1}`, draggable: "false" }), box.input) : h("div.clip-of", {}, `${medium.kind} ${n + 1}`);
    if (medium.kind !== "picture") this.given(n, shown, box.input, frame.input, heard);
    return h("div.editor", { "data-medium": n }, shown, h("div.tools-of", {}, h("span.segments", {}, buttons, map), h("div.fields", {}, fields), this.swaps(n, medium.kind)));
  }

  /** What the model was given of a clip: a frame to draw a box on, and the loudness to choose seconds of. */
  async given(n, place, box, frame, heard) {
    try {
      const { parts } = await ask("given", { ...this.asked, n }, this.visit.signal);
      place.replaceChildren(...parts.map((part) => (part.kind === "video" ? this.canvas(n, this.frame(n, part, frame), box) : hearing(part, heard[0].input, heard[1].input))));
      for (const one of heard) one.hidden = parts.every((part) => part.kind !== "sound");
    } catch (error) {
      if (error.name !== "AbortError") place.replaceChildren(trouble(error));
    }
  }

  /** The frame of a video that `input` has the number of, as the model was given it. */
  frame(n, part, input) {
    const [wide, high] = part.tile;
    const seen = h("canvas.still", { width: wide, height: high, role: "img", "aria-label": `a frame of video ${n + 1}` });
    const sheet = new Image();
    const draw = () => {
      const shown = Math.round(((Number(input.value) - 1) * (part.times.length - 1)) / Math.max(1, part.frames - 1));
      seen.getContext("2d").drawImage(sheet, Math.max(0, shown) * wide, 0, wide, high, 0, 0, wide, high);
    };
    input.max = part.frames;
    input.addEventListener("input", () => sheet.complete && draw());
    sheet.addEventListener("load", draw);
    sheet.src = address("api/strip", { ...this.asked, n });
    return seen;
  }

  /** A picture, or a frame, on which a box is drawn by the pointer. */
  canvas(n, image, input) {
    const rectangle = s("rect", { class: "chosen" });
    const drawn = s("svg", { class: "drawing", viewBox: "0 0 1 1", preserveAspectRatio: "none" }, rectangle);
    const frame = h("span.frame", {}, image, drawn);
    image.addEventListener("load", () => Math.max(image.naturalWidth, image.naturalHeight) <= 160 && image.classList.add("small"));
    let from = null;
    const at = (event) => {
      const place = drawn.getBoundingClientRect();
      const share = (value, low, size) => Math.min(1, Math.max(0, Math.round((100 * (value - low)) / size) / 100));
      return [share(event.clientX, place.left, place.width), share(event.clientY, place.top, place.height)];
    };
    drawn.addEventListener("pointerdown", (event) => {
      drawn.setPointerCapture(event.pointerId);
      from = at(event);
    });
    drawn.addEventListener("pointermove", (event) => {
      if (!from) return;
      const to = at(event);
      this.setBox(n, [Math.min(from[0], to[0]), Math.min(from[1], to[1]), Math.max(from[0], to[0]), Math.max(from[1], to[1])]);
    });
    drawn.addEventListener("pointerup", (event) => {
      const to = at(event);
      if (from && from[0] === to[0] && from[1] === to[1]) this.setBox(n, WHOLE);
      from = null;
    });
    frame.chosen = (box) => {
      for (const [name, size] of Object.entries({ x: box[0], y: box[1], width: box[2] - box[0], height: box[3] - box[1] })) rectangle.setAttribute(name, size);
      rectangle.toggleAttribute("hidden", box === WHOLE);
      input.value = box.map(percent).join(" ");
    };
    return frame;
  }

  setBox(n, box) {
    const fits = box.length === 4 && box.every((share) => share >= 0 && share <= 1) && box[0] < box[2] && box[1] < box[3];
    const chosen = fits && box.some((share, i) => share !== WHOLE[i]) ? box : WHOLE;
    this.boxes.set(n, chosen);
    this.media.querySelector(`[data-medium="${n}"] .frame`)?.chosen(chosen);
  }

  /** Episodes of the same step, for the kinds of media of which the list that led here has none to swap with. */
  async findOthers() {
    const { page: { media, step }, asked: { run } } = this;
    const missing = [...new Set(media.map(({ kind }) => kind))].filter((kind) => !this.others(kind).length);
    const found = await Promise.all(missing.map((medium) => ask("episodes", { run, first: step, last: step, medium, limit: 200 }, this.visit.signal)));
    this.rows = [...this.rows, ...found.flatMap(({ episodes }) => episodes)];
  }

  /** Episodes of other tasks with such a medium, one of each. */
  others(kind) {
    const tasks = new Set([this.page.task.id]);
    return this.rows.filter((row) => row.media?.includes(kind) && !tasks.has(row.task) && tasks.add(row.task)).slice(0, MOST_OTHERS);
  }

  /** What a medium can be swapped with: those of other episodes, and a file. */
  swaps(n, kind) {
    const rows = this.others(kind);
    const swap = (row) => () => this.add({ medium: n, change: "swap", other: { file: row.file, id: row.name } }, `swap with ${row.task}`);
    const tile = (row) => h("button", { type: "button", title: row.task, "aria-label": `swap with ${row.task}`, click: swap(row) },
      kind === "picture" ? h("img", { src: address("api/thumb", { run: this.asked.run, file: row.file, id: row.name }), alt: "", loading: "lazy" }) : row.task);
    const file = kind === "picture" ? h("label.upload", {}, "a file ", h("input", { type: "file", accept: "image/*", change: (event) => this.upload(n, event.target.files[0]) })) : "";
    return rows.length || file ? h("details", {}, h("summary", {}, "swap with"), h("div.swaps", {}, rows.map(tile), file)) : "";
  }

  upload(n, file) {
    if (!file) return;
    const reader = new FileReader();
    reader.addEventListener("load", () => this.add({ medium: n, change: "swap", picture: reader.result.split(",")[1] }, `swap with ${file.name}`));
    reader.readAsDataURL(file);
  }

  field(text) {
    const key = `${text.turn} ${text.message} ${text.block}`;
    const area = h("textarea", { rows: Math.min(10, 1 + text.text.split("\n").length), "aria-label": `${text.role}'s text`, input: () => {
      if (area.value === text.text) this.texts.delete(key);
      else this.texts.set(key, { turn: text.turn, message: text.message, block: text.block, text: area.value });
      this.showEdits();
    } });
    area.value = this.texts.get(key)?.text ?? text.text;
    return h("label.words", {}, h("span", {}, text.turn < 0 ? text.role : `turn ${text.turn + 1}, ${text.role}`), area);
  }

  add(asked, words) {
    this.edits.push({ asked, words });
    this.showEdits();
  }

  showEdits() {
    const several = this.page.media.length > 1;
    const chips = this.edits.map((edit, i) => h("span.chip", {}, several ? `${this.page.media[edit.asked.medium].kind} ${edit.asked.medium + 1}: ` : "", edit.words,
      h("button", { type: "button", "aria-label": `without ${edit.words}`, click: () => (this.edits.splice(i, 1), this.showEdits()) }, "×")));
    if (this.texts.size) chips.push(h("span.chip", {}, counted(this.texts.size, "other text")));
    this.chips.replaceChildren(...chips);
  }

  /** Ask, show what is done meanwhile, and what is wrong. Another request ends the one before. */
  async request(path, body, show) {
    this.running?.abort();
    const running = (this.running = new AbortController());
    this.stop.hidden = false;
    this.state.textContent = "…";
    this.element.setAttribute("aria-busy", "true");
    try {
      show(await post(`what_if/${path}`, body, (words) => (this.state.textContent = words), running.signal));
    } catch (error) {
      if (error.name !== "AbortError") this.output.replaceChildren(trouble(error));
    } finally {
      if (this.running === running) {
        this.running = null;
        this.stop.hidden = true;
        this.state.textContent = "";
        this.element.removeAttribute("aria-busy");
      }
    }
  }

  answer() {
    const none = this.sampling.value === "none";
    const sampled = none ? null : this.sampled();
    if (!none && !sampled) return;
    const texts = [...this.texts.values()].filter((text) => text.turn <= this.at);
    const body = { ...this.before, media: this.edits.map((edit) => edit.asked), texts, new: sampled };
    return this.request("answer", body, (found) => this.showAnswer(found));
  }

  showAnswer(found) {
    const { before, after } = found;
    const now = after ?? before;
    const against = after ? before.logprobs : found.stored;
    const row = (words, one) => h("tr", {}, h("th", {}, words), h("td", {}, number(one.sum)), h("td", {}, number(one.mean)), h("td", {}, after && one === after ? signed(one.sum - before.sum) : ""));
    const rows = [row("as it was", before), after ? row("edited", after) : ""];
    const drawn = found.tokens.map((text, i) => token(text, now.logprobs[i], after ? against[i] : null));
    const previews = found.edited.map((one) => h("figure.preview", {}, one.picture ? h("img", { src: one.picture, alt: "what the model is shown" }) : loud(one.loudness ?? [], one.before), h("figcaption", {}, one.words.join(", "))));
    this.output.replaceChildren(
      previews.length ? h("div.previews", {}, previews) : "",
      h("h3", {}, after ? "The written answer, by how its log-prob moves" : "The written answer"), h("pre.tokens", {}, drawn),
      h("div.scroll", {}, h("table.facts-table", {}, h("thead", {}, h("tr", {}, ["log-prob", "sum", "mean", "change"].map((name) => h("th", {}, name)))), h("tbody", {}, rows))),
      ...(found.new ? [h("h3", {}, `A new answer${found.new.finish === "length" ? ", cut at its length" : ""}`), h("pre.tokens.new", {}, found.new.tokens.map((text, i) => token(text, found.new.logprobs[i], null))), rewards(found.new)] : []),
      h("p.note", {}, `By ${found.model}.${disagreement(found)}`));
    hints(this.output, this.visit.signal);
  }

  map(n) {
    return this.request("map", { ...this.before, medium: n, cells: this.offered.cells }, (found) => this.showMap(n, found));
  }

  showMap(n, found) {
    const { across, down, changes } = found;
    const most = Math.max(...changes.flat().map((change) => Math.abs(change ?? 0)), 1e-9);
    const cells = changes.flatMap((row, y) => row.map((change, x) => {
      const cell = s("rect", { class: `cell ${change < 0 ? "down" : "up"}`, x: across[x], y: down[y], width: across[x + 1] - across[x], height: down[y + 1] - down[y] });
      cell.style.setProperty("--s", (Math.abs(change ?? 0) / most).toFixed(3));
      cell.hint = [["covered, the log-prob moves by", signed(change)], ["to", number(found.before + (change ?? 0))]];
      return cell;
    }));
    const image = h("img", { src: address("api/medium", { ...this.asked, n }), alt: `picture ${n + 1}`, class: "mapped" });
    const drawn = s("svg", { class: "heat", viewBox: "0 0 1 1", preserveAspectRatio: "none", role: "img", "aria-label": `by place, the answer's log-prob moves by ${number(-most)} at most` }, ...cells);
    this.output.replaceChildren(h("h3", {}, "Where the answer looks"), h("span.frame.map", {}, image, drawn),
      h("p.note", {}, `Each place is covered with the picture's mean colour. Red: the answer's log-prob (${number(found.before)}) falls; green: it rises; the full tint is ${number(most)}.${this.edits.length || this.texts.size ? " The map is of the episode as it was, without the edits above." : ""} By ${found.model}.`));
    hints(this.output, this.visit.signal);
  }

  showForking() {
    if (!this.page.task.environment) {
      this.forking.replaceChildren();
      return;
    }
    const area = h("textarea", { rows: 2, "aria-label": "your response" });
    const own = () => area.value.trim() && this.fork([...this.typed, area.value], false);
    this.forking.replaceChildren(h("h3", {}, this.typed.length ? `Turn ${this.at + this.typed.length + 1}: your response` : `Go on from turn ${this.at + 1}`),
      this.typed.length ? "" : h("p.note", {}, "The environment is played again from its seed, with the recorded acts before this turn."), area,
      h("div.controls", {}, h("button", { type: "button", click: own }, "Act"), h("button", { type: "button", click: () => this.fork(this.typed, true) }, "Let the model go on"),
        this.typed.length ? h("button", { type: "button", click: () => ((this.typed = []), this.output.replaceChildren(), this.showForking()) }, "From the beginning") : ""));
  }

  fork(responses, onward) {
    const sampled = this.sampled();
    return sampled && this.request("fork", { ...this.before, responses, go_on: onward, new: sampled }, (found) => {
      this.typed = onward ? [] : responses;
      const turns = found.turns.map((turn) => h("section.turn.forked", {}, h("h3", {}, `Turn ${turn.index + 1}`), turn.observation.map(message),
        h("article.message.assistant", {}, h("header", {}, h("b", {}, turn.by === "person" ? "you" : "the model")),
          h("pre.tokens", {}, turn.by === "person" ? turn.text : turn.tokens.map((text, i) => token(text, turn.logprobs[i], null))),
          h("footer", {}, turn.reward === null ? "" : h("span.chip", {}, "reward ", h("b", {}, number(turn.reward)))))));
      const ended = found.next.length && !onward ? "" : h("p.note", {}, `The episode ${found.status === "truncated" ? "was truncated" : found.status}${found.failure ? `: ${found.failure}` : ""}${found.success === null ? "" : found.success ? ", with success" : ", without success"}; all rewards of its turns are ${number(found.reward)}.`);
      this.output.replaceChildren(...turns, ...found.next.map(message), ended, found.next.length && !onward ? "" : rewards(found), h("p.note", {}, `By ${found.model}.`));
      hints(this.output, this.visit.signal);
      if (!found.next.length) this.typed = [];
      this.showForking();
    });
  }
}

const value = (one) => Number(one.input.value);

function field(words, attributes) {
  const input = h("input", { type: "number", ...attributes, input: () => mark(made, "") });
  const flaw = h("span.flaw", { role: "alert" });
  const made = h("label.number", {}, `${words} `, input, flaw);
  return Object.assign(made, { input, flaw });
}

/** Say beside a field what is wrong with it; nothing takes the mark away. */
function mark({ input, flaw }, words) {
  input.setAttribute("aria-invalid", String(words !== ""));
  flaw.textContent = words;
}

/** Whether these fields have numbers that can be asked. Those that do not are marked; any step but 1 is a suggestion. */
function complete(...fields) {
  for (const one of fields) {
    const { value, validity, step, min, max } = one.input;
    const whole = step === "1";
    const right = value && !validity.rangeUnderflow && !validity.rangeOverflow && !(whole && validity.stepMismatch);
    mark(one, right ? "" : `${whole ? "A whole number" : "A number"}${max ? ` from ${min} to ${max}` : `, ${min} or more`}.`);
  }
  const flawed = fields.find(({ flaw }) => flaw.textContent);
  flawed?.input.focus();
  return !flawed;
}

/** A token with its log-prob, tinted by how that moved where it is compared. */
function token(text, logprob, before) {
  const moved = typeof logprob === "number" && typeof before === "number" ? logprob - before : null;
  const span = h("span.token", { class: moved === null ? (logprob === null ? "" : "rare") : moved > 0 ? "up" : "down" }, text || "·");
  if (!text) span.dataset.silent = "";
  span.style.setProperty("--s", Math.min(1, Math.abs(moved ?? logprob ?? 0) / (moved === null ? 4 : FULL)).toFixed(3));
  span.hint = [["token", JSON.stringify(text)], ["log-prob", number(logprob)], moved === null ? null : ["before", number(before)], moved === null ? null : ["moves by", signed(moved)]];
  return span;
}

/** Elements with a hint show it beside the pointer. */
function hints(place, signal) {
  const hint = document.getElementById("hint");
  place.addEventListener("pointerover", ({ target }) => {
    hint.hidden = !target.hint;
    if (!target.hint) return;
    hint.replaceChildren(...target.hint.filter(Boolean).map(([words, said]) => h("div", {}, `${words} `, h("b", {}, said))));
    const box = target.getBoundingClientRect();
    hint.style.left = `${Math.max(8, Math.min(box.left, document.documentElement.clientWidth - hint.offsetWidth - 8))}px`;
    hint.style.top = `${box.bottom + hint.offsetHeight + 8 > innerHeight ? box.top - hint.offsetHeight - 6 : box.bottom + 6}px`;
  }, { signal });
  place.addEventListener("pointerleave", () => (hint.hidden = true), { signal });
}

/** How far the recomputed log-probs are from those that were stored, in words, where that is worth some. */
function disagreement({ stored, before }) {
  const gaps = before.logprobs.map((value, i) => Math.abs((value ?? 0) - (stored[i] ?? value ?? 0)));
  const most = Math.max(0, ...gaps);
  return stored.length ? ` Its log-probs of the answer as it was ${most < 1e-3 ? "are those that were recorded" : `differ from the recorded ones by up to ${number(most)}: other weights wrote it, or with other precision`}.` : "";
}

/** The reward terms of a new answer, and those that are not asked here. */
function rewards({ scores = [], unscored = [] }) {
  const chips = scores.map((one) => h("span.chip", { class: one.value === null ? "missing" : verdict(one.correct) }, `${one.name} `, h("b", {}, one.value === null ? "missing" : number(one.value)), one.weight === 1 ? "" : ` × ${number(one.weight)}`));
  return h("p.chips", {}, chips, unscored.length ? h("span.note", {}, `not asked: ${unscored.join(", ")}`) : "");
}

function message(one) {
  return h("article.message", { class: one.role }, h("header", {}, h("b", {}, one.role)), one.blocks.map((block) =>
    "text" in block ? h("p.text", {}, block.text) : block.picture ? h("span.frame", {}, h("img.shown", { src: block.picture, alt: "what is shown" })) : loud(block.loudness ?? [])));
}

/** Loudness as bars; what it was before, where that is another, in a lighter tint behind. */
function loud(levels, before = []) {
  const most = Math.max(...levels, ...before, 1e-6);
  const bars = (some) => some.map((level, i) => `M${4 * i + 2} ${(20 * (1 - level / most)).toFixed(1)}V${(20 * (1 + level / most)).toFixed(1)}`).join("");
  return s("svg", { class: "wave", viewBox: `0 0 ${4 * levels.length} 40`, preserveAspectRatio: "none", role: "img", "aria-label": "loudness" },
    ...(before.length ? [s("path", { d: bars(before), class: "before" })] : []), s("path", { d: bars(levels) }));
}

/** The loudness of a sound, over which the pointer draws the seconds that two fields have. */
function hearing(part, from, to) {
  const drawn = loud(part.loudness);
  const width = drawn.viewBox.baseVal.width;
  const rectangle = s("rect", { class: "chosen", y: 0, height: 40 });
  const across = (time) => width * Math.min(1, Math.max(0, (time - part.start) / (part.end - part.start)));
  const show = () => {
    const [low, high] = [across(Number(from.value)), across(Number(to.value))];
    rectangle.setAttribute("x", low);
    rectangle.setAttribute("width", Math.max(0, high - low));
  };
  const at = (event) => {
    const box = drawn.getBoundingClientRect();
    return part.start + Math.min(1, Math.max(0, (event.clientX - box.left) / box.width)) * (part.end - part.start);
  };
  let began = null;
  const choose = (event) => {
    const now = at(event);
    from.value = Math.min(began, now).toFixed(2);
    to.value = Math.max(began, now).toFixed(2);
    show();
  };
  drawn.addEventListener("pointerdown", (event) => {
    drawn.setPointerCapture(event.pointerId);
    began = at(event);
  });
  drawn.addEventListener("pointermove", (event) => began !== null && choose(event));
  drawn.addEventListener("pointerup", () => (began = null));
  for (const input of [from, to]) input.addEventListener("input", show);
  drawn.append(rectangle);
  show();
  return drawn;
}
