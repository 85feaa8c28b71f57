// One episode as it was: its prompt, turns, media and tokens, what it was rewarded for, its group, its task at other steps.

import { address, ask, counted, h, number, signed, trouble, verdict } from "./dom.js";
import { clip, film, picture } from "./media.js";
import { pair, result, shown } from "./runs.js";
import { WhatIf } from "./what_if.js";

const STRONGEST = 2; // an advantage of this size, or larger, has the full tint, as in the report
const SURPRISING = 4; // so has a token that had this negative log-prob, and a difference of 1
const UNSURE = 2; // an entropy in nats
const MISMATCHED = 0.1; // a difference of log-probs that bfloat16 does not explain
const MOST_TOKENS = 20_000; // that are coloured at first
const TIME = /\b(?:(\d{1,2}):)?(\d{1,2}):(\d{2}(?:\.\d+)?)\b|\b(\d{1,5}(?:\.\d+)?)\s?(?:s|secs?|seconds?)\b/g;
const CALL = /<tool_call>((?:(?!<tool_call>)[\s\S])*?)<\/tool_call>/g; // linear in a text of many that are not closed

/** How tokens can be coloured: what the number is called, its value for a token, and its tint (sign and share). */
const COLOURINGS = {
  none: { words: "no colour" },
  advantage: { words: "advantage", of: (tokens, i) => tokens.advantages[i], tint: (value) => [value > 0 ? "up" : value < 0 ? "down" : "flat", Math.abs(value) / STRONGEST] },
  logprob: { words: "log-prob", of: (tokens, i) => tokens.logprobs[i], tint: (value) => ["rare", -value / SURPRISING] },
  sampled: { words: "sampled − policy", of: (tokens, i) => difference(tokens.sampled[i], tokens.logprobs[i]), tint: (value) => [value > 0 ? "up" : "down", Math.abs(value)] },
  entropy: { words: "entropy", of: (tokens, i) => tokens.entropies[i], tint: (value) => ["rare", value / UNSURE], about: "of the policy before the token, in nats" },
  mismatch: { words: "mismatch", of: (tokens, i) => tokens.mismatches[i], tint: (value) => [value > 0 ? "up" : value < 0 ? "down" : "flat", Math.abs(value) / MISMATCHED], about: "log-prob in training − in sampling" },
};

const MEASURED = ["entropy", "mismatch"]; // what the trainer finds of the tokens that it trains on
const difference = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : null);
let colouring = "advantage";
let scale = "auto";
let wanted = ""; // the episode of which what if was asked for before its page had come

export async function showEpisode(visit) {
  const run = visit.parts[1];
  const asked = { run, file: visit.asked.get("file"), id: visit.asked.get("id") };
  wanted = "";
  visit.keys.w = () => (wanted = JSON.stringify(asked));
  const [page, about] = await Promise.all([ask("episode", asked, visit.signal), ask("run", { run }, visit.signal)]);
  const listed = shown.run === run ? shown : { hash: "", rows: [] };
  visit.list = listed.hash;
  visit.way([about.name, `#/run/${run}`], ["episodes", visit.list || `#/run/${run}/episodes`], [asked.id, ""]);
  shown.chosen = `${asked.file} ${asked.id}`;
  const episode = new Episode(visit, asked, page, listed.rows);
  episode.show();
  if (wanted === JSON.stringify(asked) && page.turns.length) episode.ask();
}

class Episode {
  constructor(visit, asked, page, rows) {
    Object.assign(this, { visit, asked, page, rows });
    this.clips = new Map();
    this.pictures = [];
    this.responses = [];
    this.film = null;
    this.active = null;
    const written = page.turns.some((turn) => turn.tokens);
    this.colourings = ["none", ...["advantage", "logprob", "sampled", "entropy", "mismatch"].filter((name) => page.stored[name] || (written && MEASURED.includes(name)))];
    this.mode = page.stored[colouring] || colouring === "none" ? colouring : this.colourings.find((name) => page.stored[name]) ?? "none";
  }

  show() {
    const { page } = this;
    const prompt = page.head.length ? h("section.message-list", {}, page.head.map((message) => this.message(message, []))) : "";
    const turns = page.turns.map((turn) => this.turn(turn));
    if (page.film.length > 1) {
      this.film = film(this.asked, page.film, (turn) => page.turns[turn]?.places ?? [], (turn) => page.turns[turn]?.response ?? "", () => scale);
      this.active = this.film;
    }
    const main = h("div.episode-main", {}, this.tools(), this.film?.element, prompt, turns, page.turns.length ? "" : h("p.note", {}, page.failure || "It has no turns."));
    const aside = h("aside", {}, this.pay(), this.rescored(), this.attempts(), this.others(), this.task(), this.judges());
    this.visit.show(this.head(), h("div.episode", {}, main, aside));
    const mine = aside.querySelector("[aria-current]"); // in a long list of attempts
    if (mine) mine.closest("ol").scrollTop = mine.offsetTop - mine.closest("ol").offsetTop - 8;
    this.colour();
    this.keys();
  }

  head() {
    const { page } = this;
    const right = { right: "✓ right", wrong: "✗ wrong", open: "" }[verdict(page.correct)];
    const at = this.rows.findIndex((one) => one.file === this.asked.file && one.name === this.asked.id);
    const to = (row, words, title) => (row ? h("a.button", { href: this.hash(row), title }, words) : "");
    return h("div.head", {}, h("h1", {}, page.task.id),
      page.turns.length ? h("button", { type: "button", title: "ask the model with other media or words (w)", click: () => this.ask() }, "What if …") : "",
      h("nav.neighbours", {}, at >= 0 ? h("span", {}, `${at + 1} of ${this.rows.length} on the page`) : "", to(this.rows[at - 1], "↑ before", "k"), at >= 0 ? to(this.rows[at + 1], "↓ next", "j") : ""),
      h("p.facts", {}, right ? h("span.pill", { class: verdict(page.correct) }, right) : "", h("span", {}, "reward ", h("b", {}, number(page.reward))),
        h("span", {}, `step ${number(page.step)}`), h("span", {}, `attempt ${page.place + 1} of ${page.attempts.length || 1}`), h("span", {}, page.status),
        page.fate && page.fate !== "trained" ? h("span", {}, page.fate) : page.fate, page.task.category ? h("span", {}, page.task.category) : "",
        h("span", {}, counted(page.turns.length, "turn")), h("span", {}, counted(page.turns.reduce((sum, turn) => sum + turn.count, 0), "token"))),
      page.failure ? h("p.trouble", {}, page.failure) : "");
  }

  /** Open or close the what-if panel; from a page that is being left, on the next one if that shows the same episode. */
  ask() {
    if (this.visit.ended) {
      wanted = JSON.stringify(this.asked);
      return;
    }
    this.whatIf ??= new WhatIf(this.visit, this.asked, this.page, this.rows);
    this.whatIf.toggle(document.querySelector(".episode-main"));
  }

  hash(row) {
    return address(`#/run/${this.asked.run}/episode`, { file: row.file, id: row.name });
  }

  tools() {
    this.legend = h("span.legend");
    this.choices = this.colourings.map((name) => h("button", { type: "button", "data-mode": name, title: COLOURINGS[name].about ?? "", click: () => this.choose(name) }, COLOURINGS[name].words));
    const units = h("select", { "aria-label": "unit of coordinates", change: () => {
      scale = units.value;
      for (const one of this.pictures) one.draw();
      this.film?.draw();
    } }, [["auto", "guess"], ["pixels", "pixels"], ["1000", "of 1000"], ["1", "of 1"]].map(([value, words]) => h("option", { value, selected: scale === value }, words)));
    const named = this.page.turns.some((turn) => turn.places.length);
    return h("div.tools", {}, this.choices.length > 1 ? [h("span", {}, "tokens by"), h("span.segments", { role: "group" }, this.choices), this.legend] : "", named ? h("label", {}, "coordinates ", units) : "");
  }

  choose(name) {
    colouring = this.mode = name;
    this.colour();
  }

  colour() {
    const { of, tint, about } = COLOURINGS[this.mode];
    const absent = MEASURED.includes(this.mode) && this.page.unmeasured ? `not recorded: ${this.page.unmeasured}` : "not recorded";
    for (const button of this.choices) button.setAttribute("aria-pressed", button.dataset.mode === this.mode);
    let [low, high] = [Infinity, -Infinity];
    for (const { spans, tokens } of this.responses) {
      spans.forEach((span, i) => {
        const value = of?.(tokens, i);
        if (typeof value !== "number") return (span.className = "token");
        low = Math.min(low, value);
        high = Math.max(high, value);
        const [name, share] = tint(value);
        span.className = `token ${name}`;
        span.style.setProperty("--s", Math.min(1, share).toFixed(3));
      });
    }
    this.legend?.replaceChildren(low <= high ? `${number(low)} to ${number(high)}${about ? `, ${about}` : ""}` : of ? absent : "");
  }

  message(message, places) {
    const words = h("header", {}, h("b", {}, message.role));
    const offered = message.tools?.length ? h("details", {}, h("summary", {}, counted(message.tools.length, "tool")), h("pre", {}, JSON.stringify(message.tools, null, 1))) : "";
    return h("article.message", { class: message.role }, words, message.blocks.map((block) => ("text" in block ? h("p.text", {}, block.text) : this.medium(block.medium, places))), offered);
  }

  medium(n, places) {
    const medium = this.page.media[n];
    if (medium.kind !== "picture") {
      const made = clip(this.asked, n, medium, (...cursor) => this.moved(made, ...cursor));
      made.element.addEventListener("focusin", () => (this.active = made));
      this.active ??= made;
      this.clips.set(n, made);
      return made.element;
    }
    const shown = picture(address("api/medium", { ...this.asked, n }), `picture ${n + 1}`, places, () => scale);
    this.pictures.push(shown);
    return h("figure.shot", {}, shown, medium.augmented ? h("figcaption.augmented", {}, `augmented: ${medium.augmented}`) : "");
  }

  turn(turn) {
    const seen = turn.observation.some((message) => message.blocks.some((block) => "medium" in block && this.page.media[block.medium].kind === "picture"));
    const before = this.page.film.filter((shot) => shot.turn < turn.index).at(-1) ?? this.firstPicture();
    const drawnApart = turn.places.length && !seen && before ? this.medium(before.medium, turn.places) : "";
    const several = this.page.turns.length > 1;
    const after = several && turn.after !== null && turn.after !== turn.index - 1 ? `, after ${turn.after < 0 ? "the beginning" : `turn ${turn.after + 1}`}` : "";
    return h("section.turn", { id: `turn-${turn.index}`, class: several ? "short" : "" },
      several ? h("h2", {}, `Turn ${turn.index + 1}`, h("small", {}, after)) : "",
      h("div.observed", {}, turn.observation.map((message) => this.message(message, seen ? turn.places : []))),
      h("article.message.assistant", {}, h("header", {}, h("b", {}, "response"), h("span", {}, counted(turn.count, "token")), turn.cut ? h("span.pill.grave", {}, "cut") : "", this.versions(turn)),
        this.response(turn), this.calls(turn.response), drawnApart, this.outcome(turn)));
  }

  firstPicture() {
    const medium = this.page.media.findIndex((one) => one.kind === "picture");
    return medium < 0 ? null : { medium };
  }

  versions(turn) {
    const numbers = turn.versions.map(([version]) => version);
    return h("span", { title: "the versions of the weights that wrote it" }, numbers.length > 1 ? `weights ${numbers[0]} to ${numbers.at(-1)}` : `weights ${numbers[0] ?? 0}`);
  }

  response(turn) {
    const place = h("pre.tokens");
    const { tokens } = turn;
    if (!tokens) {
      place.append(turn.response || h("i.empty", {}, "nothing"));
      return place;
    }
    const marks = this.marks(turn);
    const fill = (most) => {
      let at = 0;
      const spans = tokens.texts.slice(0, most).map((text, i) => {
        const length = [...text].length;
        const mark = marks.find(({ start, end }) => start < at + length && at < end && length);
        at += length;
        const span = h("span.token", {}, text || "·");
        Object.assign(span, { token: { turn, i }, mark });
        if (!text) span.dataset.silent = "";
        if (mark) span.dataset[mark.kind] = mark.place ?? mark.time;
        return span;
      });
      place.replaceChildren(...spans);
      this.responses = this.responses.filter((one) => one.place !== place).concat({ place, spans, tokens });
      const left = tokens.texts.length - spans.length;
      if (left > 0) place.append(h("button", { type: "button", click: () => (fill(Infinity), this.colour()) }, `show ${number(left)} more tokens`));
    };
    fill(MOST_TOKENS);
    place.addEventListener("pointerover", (event) => this.hint(event.target));
    place.addEventListener("pointerleave", () => this.hint(null));
    place.addEventListener("click", (event) => event.target.mark?.kind === "time" && this.seek(event.target.mark.time));
    return place;
  }

  /** Stretches of a response (in characters) that name a place in the picture, or a time of a clip. */
  marks(turn) {
    const marks = turn.places.flatMap((place, i) => ("start" in place ? [{ kind: "place", place: i, start: place.start, end: place.end }] : []));
    if (this.page.media.every((medium) => medium.kind === "picture")) return marks;
    for (const match of turn.response.matchAll(TIME)) {
      const start = [...turn.response.slice(0, match.index)].length;
      const [, hours, minutes, seconds, plain] = match;
      const time = plain !== undefined ? Number(plain) : Number(hours ?? 0) * 3600 + Number(minutes) * 60 + Number(seconds);
      marks.push({ kind: "time", time, start, end: start + match[0].length });
    }
    return marks;
  }

  seek(time) {
    for (const one of this.clips.values()) one.seek(time);
  }

  /** The cursor of a clip has moved: words that name this time are marked, to half the distance of frames. */
  moved(from, time, times, playing) {
    for (const other of this.clips.values()) if (other.kind !== from.kind) other.follow(time, playing); // what is seen, and what is heard beside it
    const reach = times.length > 1 ? Math.max(0.25, (times[1] - times[0]) / 2) : 0.5;
    for (const { spans } of this.responses) {
      for (const span of spans) if (span.mark?.kind === "time") span.classList.toggle("now", Math.abs(span.mark.time - time) <= reach);
    }
  }

  hint(target) {
    const hint = document.getElementById("hint");
    const token = target?.token;
    document.querySelectorAll(".place.lit").forEach((one) => one.classList.remove("lit"));
    hint.hidden = !token;
    if (!token) return;
    if (target.mark?.kind === "place") target.closest(".turn").querySelectorAll(`[data-place="${target.mark.place}"]`).forEach((one) => one.classList.add("lit"));
    const { turn: { tokens }, i } = token;
    const line = (words, value) => (value === null || value === undefined ? "" : h("div", {}, `${words} `, h("b", {}, value)));
    const logprob = tokens.logprobs[i];
    hint.replaceChildren(h("code", {}, JSON.stringify(tokens.texts[i])), line("token", tokens.ids[i]), line("position", i + 1),
      line("probability", typeof logprob === "number" ? number(Math.exp(logprob)) : null), line("log-prob", logprob === undefined ? null : number(logprob)),
      line("sampled with", tokens.sampled[i] === undefined ? null : number(tokens.sampled[i])), line("advantage", tokens.advantages[i] === undefined ? null : signed(tokens.advantages[i])),
      line("entropy", tokens.entropies[i] === undefined ? null : number(tokens.entropies[i])), line("mismatch", tokens.mismatches[i] === undefined ? null : signed(tokens.mismatches[i])));
    const box = target.getBoundingClientRect();
    hint.style.left = `${Math.max(8, Math.min(box.left, document.documentElement.clientWidth - hint.offsetWidth - 8))}px`;
    hint.style.top = `${box.bottom + hint.offsetHeight + 8 > innerHeight ? box.top - hint.offsetHeight - 6 : box.bottom + 6}px`;
  }

  calls(text) {
    return [...text.matchAll(CALL)].map(([, body]) => {
      try {
        const { name, arguments: given } = JSON.parse(body);
        const rows = Object.entries(given ?? {}).map(([key, value]) => h("tr", {}, h("th", {}, key), h("td", {}, typeof value === "string" ? value : JSON.stringify(value))));
        return h("div.call", {}, h("b", {}, `calls ${name}`), h("table", {}, h("tbody", {}, rows)));
      } catch {
        return h("div.call", {}, h("b", {}, "a tool call that is not JSON"));
      }
    });
  }

  outcome(turn) {
    const parts = Object.entries(turn.parts ?? {}).map(([name, value]) => chip(name, value));
    const scores = this.page.scores.filter((score) => score.turn === turn.index).map((score) => chip(score.name, score.value, score.weight));
    const info = turn.info && Object.keys(turn.info).length ? h("details", {}, h("summary", {}, "what the environment reported"), h("pre", {}, JSON.stringify(turn.info, null, 1))) : "";
    const reward = turn.reward === null || turn.reward === undefined || (turn.reward === 0 && !parts.length) ? "" : chip("reward", turn.reward);
    return h("footer", {}, h("span.chips", {}, reward, parts, scores), info);
  }

  pay() {
    const { scores, turns, reward } = this.page;
    const parts = turns.flatMap((turn) => Object.entries(turn.parts ?? {}).map(([name, value]) => ({ name, value, turn: turn.index, weight: 1, scope: "" })));
    const terms = new Map(); // by name and weight: a term of every turn is one row, with its sum and its turns
    for (const one of [...scores, ...parts]) {
      const key = JSON.stringify([one.name, one.weight, typeof one.turn === "number" ? "turns" : one.scope]);
      terms.set(key, [...(terms.get(key) ?? []), one]);
    }
    const rows = [...terms.values()].map((several) => {
      const [{ name, weight, scope, turn }] = several;
      const missing = several.some((one) => one.value === null);
      const sum = several.reduce((total, one) => total + (one.value ?? 0), 0);
      const reasons = [...new Set(several.map((one) => one.reason).filter(Boolean))].map((reason) => h("p.reason", {}, reason));
      const byTurn = several.length > 1 ? h("p.by-turn", {}, several.map((one) => h("span.chip", { class: one.value === null ? "missing" : "" }, `${typeof one.turn === "number" ? one.turn + 1 : "–"} `, h("b", {}, one.value === null ? "missing" : number(one.value))))) : "";
      return h("tr", { class: missing ? "missing" : "" }, h("th", {}, name, reasons, byTurn),
        h("td", {}, several.length > 1 ? "by turn" : typeof turn === "number" ? `turn ${turn + 1}` : scope),
        h("td", {}, missing ? "missing" : number(sum)), h("td", {}, weight === 1 ? "" : `× ${number(weight)}`));
    });
    return h("section", {}, h("h2", {}, "Reward"), h("div.scroll", {}, h("table.pay-table", {}, h("tbody", {}, rows, h("tr.sum", {}, h("th", {}, "reward"), h("td"), h("td", {}, number(reward)), h("td"))))));
  }

  rescored() {
    const { rescored } = this.page;
    if (!rescored.length) return "";
    const parts = rescored.map((one) => {
      const terms = Object.entries(one.terms).map(([name, values]) => h("tr", { class: values[1] === null ? "missing" : "" },
        h("th", {}, name, one.reasons[name] ? h("p.reason", {}, one.reasons[name]) : ""), h("td", {}, pair(values))));
      return [h("p", {}, h("a", { href: address(`#/run/${this.asked.run}/rescored`, { name: one.rescoring }) }, one.rescoring)),
        h("div.scroll", {}, h("table.pay-table", {}, h("tbody", {}, terms, h("tr.sum", {}, h("th", {}, "reward"), h("td", {}, pair(one.reward))),
          h("tr", { class: one.turned ? "differs" : "" }, h("th", {}, "advantage"), h("td", {}, pair(one.advantage, signed))))))];
    });
    return h("section.rescored", {}, h("h2", {}, "Scored again"), parts);
  }

  attempts() {
    const { attempts } = this.page;
    if (attempts.length < 2) return "";
    const list = h("ol.found.narrow", {}, attempts.map((one) => {
      const line = result(this.asked.run, one, "", true);
      if (one.name === this.asked.id) line.firstChild.setAttribute("aria-current", "page");
      return line;
    }));
    return h("section", {}, h("h2", {}, "Its group"), list);
  }

  others() {
    const { others } = this.page;
    return others.length ? h("section", {}, h("h2", {}, "The task at other steps"), h("ol.found.narrow", {}, others.map((one) => result(this.asked.run, one, "", true)))) : "";
  }

  task() {
    const { task, info } = this.page;
    const rows = [["answer", task.answer], ["environment", task.environment && `${task.environment.name}, seed ${task.environment.seed}`],
      ...Object.entries(task.metadata ?? {}), ...Object.entries(info ?? {})]
      .filter(([, value]) => value !== null && value !== undefined && value !== "")
      .map(([name, value]) => h("tr", {}, h("th", {}, name), h("td", {}, typeof value === "string" ? value : JSON.stringify(value))));
    const more = task.options && Object.keys(task.options).length ? h("details", {}, h("summary", {}, "options"), h("pre", {}, JSON.stringify(task.options, null, 1))) : "";
    const demonstrated = task.demonstration.length ? h("details", {}, h("summary", {}, "demonstration"), task.demonstration.map((text) => h("pre", {}, text))) : "";
    return rows.length || more ? h("section", {}, h("h2", {}, "Task"), h("div.scroll", {}, h("table.facts-table", {}, h("tbody", {}, rows))), more, demonstrated) : "";
  }

  judges() {
    const { judges } = this.page;
    if (!judges.length) return "";
    return h("section.judges", {}, h("h2", {}, "Judges"), judges.map((one) => {
      const question = one.messages.map((message) => [h("b", {}, message.role ?? ""), h("pre", {}, (message.content ?? []).map((block) => block.text ?? `[${block.kind ?? "medium"}]`).join("\n"))]);
      return h("article.message", {}, h("header", {}, h("b", {}, one.term || one.prompt), h("span", {}, one.model)), h("pre", {}, one.answer), question.length ? h("details", {}, h("summary", {}, "the question"), question) : "");
    }));
  }

  keys() {
    const at = this.rows.findIndex((one) => one.file === this.asked.file && one.name === this.asked.id);
    const rows = at >= 0 ? this.rows : this.page.attempts;
    const mine = at >= 0 ? at : rows.findIndex((one) => one.name === this.asked.id);
    const move = (by) => rows[mine + by] && (location.hash = this.hash(rows[mine + by]));
    Object.assign(this.visit.keys, {
      j: () => move(1), k: () => move(-1), w: () => this.page.turns.length && this.ask(),
      c: () => this.choose(this.colourings[(this.colourings.indexOf(this.mode) + 1) % this.colourings.length]),
    });
    if (this.active) Object.assign(this.visit.keys, { ArrowLeft: () => this.active.step(-1), ArrowRight: () => this.active.step(1), " ": () => this.active.toggle() });
    this.visit.signal.addEventListener("abort", () => this.hint(null));
  }
}

function chip(name, value, weight = 1) {
  const missing = value === null || value === undefined;
  return h("span.chip", { class: missing ? "missing" : "" }, `${name} `, h("b", {}, missing ? "missing" : number(value)), weight === 1 ? "" : ` × ${number(weight)}`);
}
