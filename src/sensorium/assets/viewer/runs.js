// The list of runs with their curves and recipes side by side; one run: curves, evaluations, recipe, and its episodes.

import { ask, address, counted, drawing, h, later, number, presses, signed, since, trouble, verdict } from "./dom.js";

const COLOURS = [0, 2, 3, 4, 5, 1]; // of runs, as in the charts of the server
const CURVES = ["reward/mean", "accuracy", "eval/accuracy"];
const MOST_CHARTS = 12;
const STATES = { running: "on", finished: "well", failed: "grave", killed: "grave" };

/** The newest list that was shown, in this tab also before a reload: from it an episode knows its neighbours. */
export const shown = { run: "", hash: "", rows: [], chosen: "" };
const SHOWN = "sensorium view";
try {
  Object.assign(shown, JSON.parse(sessionStorage.getItem(SHOWN)));
} catch {} // where a browser forbids it, a reload loses the list

function keep(run, hash, rows) {
  Object.assign(shown, { run, hash, rows });
  try {
    sessionStorage.setItem(SHOWN, JSON.stringify({ run, hash, rows: rows.map(({ file, name, task, media }) => ({ file, name, task, media })) }));
  } catch {}
}

const state = (run) => h("span.pill", { class: STATES[run.state] ?? "", title: run.words }, run.state);

function health(run) {
  const words = { well: "well", caution: "caution", grave: "ill" }[run.health];
  return h("span.pill", { class: run.health, title: run.findings.map((one) => one.text).join("\n") || "no finding" }, words);
}

function progress(run) {
  const bar = h("progress", { max: run.steps || 1, value: run.step, "aria-label": "steps made" });
  return h("span.steps", {}, bar, h("span", {}, run.steps ? `${number(run.step)} / ${number(run.steps)}` : number(run.step)));
}

/** Charts in their place; those that are there stay until the new ones have come. */
async function redraw(place, runs, metrics, signal) {
  if (!runs.length || !metrics.length) return place.replaceChildren();
  const { charts } = await ask("charts", { runs: runs.join(","), metrics: metrics.join(",") }, signal);
  place.replaceChildren(...charts.map(drawing));
}

const SHARE = 0.0025; // of the server's time that following a run may take: it may be the machine that trains
const [SHORTEST_PAUSE, LONGEST_PAUSE] = [2000, 20_000];
const sleep = (ms) => new Promise((done) => setTimeout(done, ms));

/**
 * Work that is asked for again and again, one at a time, at most every 2 s; more rarely if it is slow and a run goes on.
 * Example: an answer that takes 20 ms is asked for again after 8 s, or when the run has ended.
 */
function calmly(visit, work) {
  let [busy, again, living] = [false, false, true];
  let hasten = () => {};
  const run = async (alive) => {
    living = alive;
    if (!living) hasten();
    if (busy) {
      again = true;
      return;
    }
    busy = true;
    const started = performance.now() - presses.ms;
    try {
      await work();
    } catch (error) {
      if (error.name !== "AbortError") console.warn(error.message);
    }
    const slow = Math.min(LONGEST_PAUSE, (performance.now() - presses.ms - started) / SHARE);
    await sleep(SHORTEST_PAUSE);
    if (living) await Promise.race([sleep(slow - SHORTEST_PAUSE), new Promise((done) => (hasten = done))]);
    busy = false;
    if (again && !visit.ended) {
      again = false;
      run(living);
    }
  };
  return run;
}

export async function showRuns(visit) {
  visit.way();
  let runs = (await ask("runs", {}, visit.signal)).runs;
  let chosen = (visit.asked.get("runs") ?? "").split(",").filter((id) => runs.some((run) => run.id === id));
  if (!visit.asked.has("runs")) chosen = runs.filter((run) => run.step).slice(0, 3).map((run) => run.id);
  let metrics = (visit.asked.get("metrics") ?? CURVES.join(",")).split(",").filter(Boolean);
  const names = h("datalist", { id: "metrics" });
  const filter = h("input", { type: "search", placeholder: "find a run  /", "aria-label": "find a run" });
  const rows = h("tbody");
  const plots = h("section.charts");
  const keys = h("div.picks");
  const differences = h("section");
  const head = ["", "run", "state", "steps", "reward", "accuracy", "held-out", "health", "model", "written"];
  const table = h("table.runs", {}, h("thead", {}, h("tr", {}, head.map((name) => h("th", {}, name)))), rows);

  function remember() {
    if (visit.ended) return; // the address is another page's by now
    history.replaceState(null, "", address("#/", { runs: chosen.join(",") || "none", metrics: metrics.join(",") }));
  }

  function list() {
    const held = document.activeElement?.closest("tr")?.dataset.run;
    const words = filter.value.toLowerCase().split(/\s+/);
    const found = runs.filter((run) => words.every((word) => `${run.name} ${run.model} ${run.state}`.toLowerCase().includes(word)));
    rows.replaceChildren(...found.map(row));
    if (!found.length) rows.append(h("tr", {}, h("td", { colspan: head.length }, runs.length ? "No run has these words." : "No runs yet: this page shows them as they begin.")));
    rows.querySelector(`tr[data-run="${held}"] a`)?.focus({ preventScroll: true });
  }

  function row(run) {
    const place = chosen.indexOf(run.id);
    const tick = h("input", { type: "checkbox", checked: place >= 0, "aria-label": `show the curves of ${run.name}`, change: () => toggle(run.id) });
    const cell = (name, ...content) => h("td", { "data-name": name }, ...content);
    return h("tr", { "data-run": run.id, class: place >= 0 ? "chosen" : "" },
      h("td.tick", {}, h("label", { class: place >= 0 ? `c${COLOURS[place]}` : "" }, tick, h("i"))),
      h("th", {}, h("a", { href: `#/run/${run.id}` }, run.name)),
      cell("state", state(run)), cell("steps", progress(run)),
      cell("reward", number(run.last["reward/mean"])), cell("accuracy", number(run.last.accuracy)),
      cell("held-out", number(run.last["eval/accuracy"])), cell("health", health(run)),
      h("td.model", { "data-name": "model", title: run.model }, run.model), cell("written", since(run.written)));
  }

  function toggle(id) {
    chosen = chosen.includes(id) ? chosen.filter((one) => one !== id) : [...chosen, id].slice(-COLOURS.length);
    remember();
    list();
    compare();
  }

  function pick() {
    const field = h("input", { list: "metrics", placeholder: "add a curve", "aria-label": "add a curve", focus: offer, change: () => {
      if (field.value && !metrics.includes(field.value)) metrics = [...metrics, field.value];
      remember();
      compare();
    } });
    const drop = (name) => {
      metrics = metrics.filter((one) => one !== name);
      remember();
      compare();
    };
    keys.replaceChildren(...metrics.map((name) => h("button.chip", { type: "button", title: "remove", click: () => drop(name) }, name, " ×")), field);
  }

  async function offer() {
    if (!chosen.length || names.children.length) return;
    const found = await ask("run", { run: chosen[0] }, visit.signal);
    names.replaceChildren(...found.metrics.map((value) => h("option", { value })));
  }

  async function compare() {
    pick();
    try {
      await redraw(plots, chosen, metrics, visit.signal);
      if (chosen.length < 2) return differences.replaceChildren();
      const found = await ask("differences", { runs: chosen.join(",") }, visit.signal);
      const cells = ({ key, values }) => h("tr", {}, h("th", {}, key), values.map((value) => h("td", { class: value === values[0] ? "" : "differs" }, value || "–")));
      const titles = found.runs.map((name, i) => h("th", { class: `c${COLOURS[i]}` }, h("i.swatch"), name));
      differences.replaceChildren(h("h2", {}, "Where their recipes differ"), found.keys.length
        ? h("div.scroll", {}, h("table.recipes", {}, h("thead", {}, h("tr", {}, h("th"), titles)), h("tbody", {}, found.keys.map(cells))))
        : h("p.note", {}, "Nowhere, but in their names."));
    } catch (error) {
      if (error.name !== "AbortError") plots.replaceChildren(trouble(error));
    }
  }

  filter.addEventListener("input", list);
  visit.show(h("div.head", {}, h("h1", {}, "Runs"), filter), h("div.scroll", {}, table), names, keys, plots, differences);
  list();
  compare();
  const move = (by) => {
    const links = [...rows.querySelectorAll("th a")];
    links[Math.min(links.length - 1, Math.max(0, links.indexOf(document.activeElement) + by))]?.focus();
  };
  Object.assign(visit.keys, { j: () => move(1), ArrowDown: () => move(1), k: () => move(-1), ArrowUp: () => move(-1) });
  visit.follow("", calmly(visit, async () => {
    runs = (await ask("runs", {}, visit.signal)).runs;
    list();
    await redraw(plots, chosen, metrics, visit.signal);
  }));
}

export async function showRun(visit) {
  const id = visit.parts[1];
  const tab = visit.parts[2] ?? "curves";
  let run = await ask("run", { run: id }, visit.signal);
  const here = `#/run/${id}`;
  visit.way([run.name, tab === "curves" ? "" : here], ...(tab === "curves" ? [] : [[tab, ""]]));
  const link = (name, words) => h("a", { href: name === "curves" ? here : `${here}/${name}`, "aria-current": tab === name ? "page" : null }, words);
  const facts = h("p.facts");
  const tabs = h("nav.tabs");
  const body = h("div");

  function top() {
    facts.replaceChildren(state(run), progress(run), health(run), h("span", {}, run.model), h("span", {}, "written ", since(run.written)));
    tabs.replaceChildren(link("curves", "Curves"), link("episodes", `Episodes ${run.episodes.count ? number(run.episodes.count) : ""}`),
      link("rescored", `Scored again ${run.rescorings || ""}`), link("recipe", "Recipe"));
  }

  top();
  visit.show(h("div.head", {}, h("h1", {}, run.name)), facts, tabs, body);
  const parts = { curves, episodes, rescored, recipe };
  const update = await (parts[tab] ?? curves)(visit, id, body, () => run);
  visit.follow(id, calmly(visit, async () => {
    run = await ask("run", { run: id }, visit.signal);
    top();
    await update();
  }));
}

async function curves(visit, id, body, run) {
  const findings = h("div");
  const plots = h("section.charts");
  const table = h("section");
  const filter = h("input", { type: "search", placeholder: "find a curve  /", "aria-label": "find a curve" });

  async function update() {
    const { findings: found, health: kind, problem, evaluations, metrics } = run();
    const said = problem ? [...found, { grave: false, text: problem, rule: "metrics" }] : found;
    findings.replaceChildren(said.length ? h("div.health", { class: kind }, h("ul", {}, said.map((one) =>
      h("li", { class: one.grave ? "grave" : "caution" }, h("b", {}, one.rule), ` ${one.text}`, one.step ? h("span.since", {}, ` since step ${one.step}`) : "")))) : "");
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const wanted = metrics.filter((name) => words.every((word) => name.toLowerCase().includes(word)));
    await redraw(plots, [id], wanted.slice(0, words.length ? 40 : MOST_CHARTS), visit.signal);
    const rows = evaluations.map((one) => one.problem ? h("tr", {}, h("td", { colspan: 5 }, one.problem)) : h("tr", {},
      h("td", {}, number(one.step)), h("th", {}, one.name),
      h("td", {}, number(one.accuracy), one.interval ? h("span.interval", {}, ` ${number(one.interval[0])} to ${number(one.interval[1])}`) : ""),
      h("td", {}, number(one.reward)), h("td", {}, number(one.tasks))));
    const head = ["step", "evaluation", "accuracy", "reward", "tasks"];
    table.replaceChildren(...(rows.length ? [h("h2", {}, "Evaluations"), h("div.scroll", {}, h("table", {}, h("thead", {}, h("tr", {}, head.map((name) => h("th", {}, name)))), h("tbody", {}, rows)))] : []));
    if (!metrics.length) plots.replaceChildren(h("p.note", {}, "The run has not written any metrics yet."));
  }

  filter.addEventListener("input", later(() => update().catch(() => {}), 200));
  body.replaceChildren(findings, filter, plots, table);
  await update();
  return update;
}

async function recipe(visit, id, body, run) {
  const text = h("pre");
  body.replaceChildren(h("section.recipe", {}, text));
  const update = async () => text.replaceChildren(run().recipe);
  await update();
  return update;
}

/** Rescorings of a run: what each changes by term, and the episodes that change, with links to them. */
async function rescored(visit, id, body, run) {
  const asked = Object.fromEntries(visit.asked);
  const choices = h("span.segments", { role: "group", "aria-label": "rescorings" });
  const table = h("section");
  const count = h("span.count", { role: "status" });
  const rows = h("tbody");
  const pages = h("nav.pages", { "aria-label": "pages" });
  const select = (name, words, options) => h("label", {}, h("span", {}, words), h("select", { change: (event) => change({ [name]: event.target.value, offset: "" }) },
    options.map(([value, text]) => h("option", { value, selected: (asked[name] ?? "") === value }, text))));
  const which = select("turned", "episodes", [["", "whose reward changes"], ["true", "whose advantage changes sign"]]);
  const order = select("sort", "by", [["", "size of the change"], ["gain", "gain"], ["loss", "loss"], ["step", "step"]]);
  const head = ["episode", "step", "reward", "change", "advantage", "terms"];
  const list = h("section", {}, h("h2", {}, "Episodes"), h("div.asked", {}, which, order, count),
    h("div.scroll", {}, h("table.rescored", {}, h("thead", {}, h("tr", {}, head.map((name) => h("th", {}, name)))), rows)), pages);
  const how = h("section", {}, h("p.note", {}, "Scores stored episodes by other terms, weights or judges; the run is only read. The result appears here:"), h("pre", {}, run().rescore));
  let drawn = "";

  function change(given) {
    Object.assign(asked, given);
    for (const [name, value] of Object.entries(asked)) if (!value) delete asked[name];
    if (visit.ended) return;
    history.replaceState(null, "", address(`#/run/${id}/rescored`, asked));
    return update().catch((error) => error.name !== "AbortError" && list.replaceChildren(trouble(error)));
  }

  async function update() {
    const found = (await ask("rescorings", { run: id }, visit.signal)).rescorings;
    const one = found.find((other) => other.name === asked.name) ?? found[0];
    const now = JSON.stringify([found.map((other) => other.name), one?.name, one?.written, one?.problem]);
    if (now !== drawn) draw(found, one); // else what is open or has the focus stays so
    drawn = now;
    if (one && !one.problem) await fill(one);
  }

  function draw(found, one) {
    choices.replaceChildren(...found.map((other) => h("button", { type: "button", "aria-pressed": String(other === one), click: () => change({ name: other.name, offset: "" }) }, other.name)));
    body.replaceChildren(...(one ? [choices, table, ...(one.problem ? [] : [list]), how] : [h("p.note", {}, "No rescoring of this run lies beside it."), how]));
    if (!one) return;
    if (one.problem) return table.replaceChildren(h("p.trouble", {}, one.problem));
    table.replaceChildren(h("h2", {}, one.title), h("p.facts", {}, h("span", {}, "written ", since(one.written))),
      h("div.scroll", {}, h("table", {}, h("thead", {}, h("tr", {}, ["", ...one.columns].map((name) => h("th", {}, name)))),
        h("tbody", {}, one.rows.map(([name, cells]) => h("tr", {}, h("th", { scope: "row" }, name), cells.map((cell) => h("td", {}, cell))))))),
      h("ul.notes", {}, one.notes.map((note) => h("li", {}, note))), h("details", {}, h("summary", {}, "by these rewards"), h("pre", {}, one.rewards)));
  }

  async function fill(one) {
    const page = await ask("rescored", { run: id, limit: PAGE, name: one.name, turned: asked.turned, sort: asked.sort, offset: asked.offset }, visit.signal);
    const linked = page.episodes.filter((row) => row.file);
    keep(id, address(`#/run/${id}/rescored`, asked), linked);
    const first = Number(asked.offset ?? 0);
    const last = first + page.episodes.length;
    count.textContent = page.count ? `${number(first + 1)} to ${number(last)} of ${counted(page.count, "episode")}` : "no such episode";
    rows.replaceChildren(...page.episodes.map(changed));
    const to = (words, offset, possible) => h("button", { type: "button", disabled: !possible, click: () => change({ offset: offset > 0 ? String(offset) : "" }) }, words);
    pages.replaceChildren(to("← before", first - PAGE, first > 0), to("next →", last, last < page.count));
  }

  function changed(row) {
    const last = /^train\/.*\/(\d+)$/.exec(row.name);
    const attempt = last ? h("span.note", {}, ` attempt ${number(Number(last[1]) + 1)}`) : "";
    const link = row.file ? h("a", { href: address(`#/run/${id}/episode`, { file: row.file, id: row.name }) }, row.task, attempt) : h("span", { title: "no longer in the run's logs" }, row.task);
    return h("tr", {}, h("th", { title: row.name }, link), h("td", {}, number(row.step)), ...rescoredCells(row));
  }

  await update();
  return update;
}

/** An old and a new value. */
export const pair = (values, write = number) => h("span.pair", {}, write(values[0]), " → ", h("b", {}, write(values[1])));

/** What a rescoring changed of an episode: reward, change, mean advantage, terms. */
function rescoredCells(row) {
  const [before, after] = row.reward;
  const known = typeof before === "number" && typeof after === "number";
  const terms = Object.entries(row.terms).map(([name, values]) => h("span.chip", { class: values[1] === null ? "missing" : "", title: row.reasons[name] ?? "" }, `${name} `, pair(values)));
  return [h("td", {}, pair(row.reward)), h("td", {}, known ? signed(after - before) : "–"),
    h("td", { class: row.turned ? "differs" : "", title: row.turned ? "the advantage of a turn changes its sign" : "" }, pair(row.advantage, signed)), h("td", {}, h("span.chips", {}, terms))];
}

const SORTS = ["step", "reward", "advantage", "surprise", "disagreement", "tokens", "turns", "term"];
const MEANINGS = {
  advantage: "the mean advantage of its tokens",
  surprise: "the mean negative log-prob of its tokens",
  disagreement: "the standard deviation of the rewards in its group",
};
const PAGE = 50;

async function episodes(visit, id, body, run) {
  const facets = run().episodes;
  const asked = Object.fromEntries(visit.asked);
  const fields = {};
  const count = h("span.count", { role: "status" });
  const list = h("ol.found");
  const pages = h("nav.pages", { "aria-label": "pages" });
  const problems = h("div");
  let first = true;
  let asking = 0;

  const select = (name, options) => {
    fields[name] = h("select", { name }, options.map(([value, words]) => h("option", { value, selected: asked[name] === value }, words)));
    return fields[name];
  };
  const field = (name, type = "number", more = {}) => {
    fields[name] = h("input", { name, type, value: asked[name] ?? "", ...more });
    return fields[name];
  };
  const labelled = (words, ...inputs) => h("label", {}, h("span", {}, words), ...inputs);
  const range = (words, low, high, more) => h("div.range", { role: "group", "aria-label": words }, h("span", {}, words),
    field(low, "number", { placeholder: "from", "aria-label": `${words} from`, ...more }), field(high, "number", { placeholder: "to", "aria-label": `${words} to`, ...more }));
  const counts = (name) => [["", "any"], ...facets[name].map((one) => [one.name, `${one.name} (${number(one.count)})`])];
  const truth = (yes, no) => [["", "any"], ["true", yes], ["false", no]];
  const sorts = SORTS.map((name) => [name, name === "step" ? "newest" : name]);
  const search = h("input", { name: "text", type: "search", value: asked.text ?? "", placeholder: "words of prompt, response, judge …  /",
    "aria-label": "search the text", title: 'All words must occur. "a phrase", begin*, prompt:word, response:, seen:, judge:, failure:' });
  fields.text = search;
  const form = h("form.filters", { submit: (event) => event.preventDefault() },
    labelled("log", select("log", counts("log"))),
    range("step", "first", "last", { min: 0 }),
    labelled("verdict", select("correct", truth("right", "wrong"))),
    labelled("failure", select("failed", truth("failed", "in order"))),
    labelled("status", select("status", counts("status"))),
    labelled("fate", select("fate", counts("fate"))),
    labelled("category", select("category", counts("category"))),
    labelled("task", field("task", "text")),
    labelled("part of the reward", select("term", [["", "the whole"], ...facets.terms.map((name) => [name, name])])),
    range("reward or part", "low", "high", { step: "any" }),
    range("tokens", "least_tokens", "most_tokens", { min: 0 }),
    range("turns", "least_turns", "most_turns", { min: 0 }),
    h("button", { type: "button", click: clear }, "clear"));
  const sort = select("sort", sorts);
  const ascending = h("button", { type: "button", title: "turn the order round", click: () => {
    if (asked.ascending) delete asked.ascending;
    else asked.ascending = "true";
    change();
  } });
  const wide = matchMedia("(min-width: 900px)").matches;
  const narrowed = ["log", "first", "last", "correct", "failed", "status", "fate", "category", "task", "term", "low", "high", "least_tokens", "most_tokens", "least_turns", "most_turns"];
  const filters = h("details.filtering", { open: wide || narrowed.some((name) => asked[name]) }, h("summary", {}, "filters"), form);

  function clear() {
    for (const name of Object.keys(asked)) if (name !== "sort") delete asked[name];
    for (const [name, input] of Object.entries(fields)) if (name !== "sort") input.value = "";
    change();
  }

  const here = () => address(`#/run/${id}/episodes`, asked);
  const offset = () => Number(asked.offset ?? 0);

  async function update() {
    ascending.textContent = asked.ascending ? "↑" : "↓";
    let found;
    const mine = ++asking;
    try {
      found = await ask("episodes", { run: id, limit: PAGE, ...asked }, visit.signal);
      if (mine !== asking) return; // something else was asked for meanwhile
    } catch (error) {
      if (error.name === "AbortError" || mine !== asking) return;
      count.replaceChildren();
      list.replaceChildren(h("li", {}, trouble(error)));
      return;
    }
    keep(id, here(), found.episodes);
    const last = offset() + found.episodes.length;
    count.textContent = (found.count ? `${number(offset() + 1)} to ${number(last)} of ${counted(found.count, "episode")}` : "no such episode") +
      (found.busy ? ", indexing…" : found.waits ? "; others are indexed slowly, the newest first, so as not to slow the run" : "");
    const held = list.contains(document.activeElement) || (first && shown.chosen);
    const rows = found.episodes.map((one) => result(id, one, asked.sort ?? "step"));
    list.replaceChildren(...rows);
    if (!rows.length) list.append(h("li.empty", {}, run().episodes.count || found.busy ? nothing() : "The run has not logged any episodes yet."));
    if (held) list.querySelector(`a[data-id="${CSS.escape(shown.chosen)}"]`)?.focus({ preventScroll: !first });
    first = false;
    const to = (words, where, possible) => h("button", { type: "button", disabled: !possible, click: () => turn(where) }, words);
    pages.replaceChildren(to("← before", offset() - PAGE, offset() > 0), to("next →", last, last < found.count));
    problems.replaceChildren(...run().episodes.problems.map((words) => h("p.trouble", {}, words)));
  }

  function nothing() {
    const filtered = narrowed.some((name) => asked[name]);
    const words = asked.text ? ` All words of the search must occur, whole: squ* finds words that begin so, "red square" a phrase, and response:red a word of the response (also prompt:, seen:, judge:, failure:).` : "";
    return `No episode fits${asked.text ? " the search" : ""}${asked.text && filtered ? " and" : ""}${filtered ? " the filters: clear removes them" : ""}.${words}`;
  }

  function turn(where) {
    asked.offset = String(Math.max(0, where));
    if (asked.offset === "0") delete asked.offset;
    shown.chosen = "";
    change(true);
    window.scrollTo(0, 0);
  }

  function change(sameSearch = false) {
    if (visit.ended) return; // the address is another page's by now
    if (!sameSearch) delete asked.offset;
    history.replaceState(null, "", here());
    return update();
  }

  const typed = later(() => {
    for (const [name, input] of Object.entries(fields)) {
      if (input.value) asked[name] = input.value;
      else delete asked[name];
    }
    if (asked.sort === "step") delete asked.sort;
    if (asked.sort === "term" && !asked.term) {
      asked.term = fields.term.value = facets.terms[0] ?? "";
    }
    change();
  }, 180);
  for (const input of Object.values(fields)) input.addEventListener("input", typed);
  search.addEventListener("keydown", (event) => event.key === "Enter" && list.querySelector("a")?.focus());

  const move = (by) => {
    const links = [...list.querySelectorAll("a")];
    const at = links.indexOf(document.activeElement);
    const next = links[at < 0 ? 0 : Math.min(links.length - 1, Math.max(0, at + by))];
    next?.focus();
    next?.scrollIntoView({ block: "nearest" });
  };
  list.addEventListener("focusin", (event) => (shown.chosen = event.target.dataset.id ?? ""));
  Object.assign(visit.keys, {
    j: () => move(1), ArrowDown: () => move(1), k: () => move(-1), ArrowUp: () => move(-1),
    ArrowRight: () => pages.lastChild?.click(), ArrowLeft: () => pages.firstChild?.click(),
  });
  const order = h("label.order", { title: Object.entries(MEANINGS).map(([name, words]) => `${name}: ${words}`).join("\n") }, h("span", {}, "by"), sort);
  body.replaceChildren(problems, h("div.search", {}, filters, h("section.results", {}, h("div.asked", {}, search, order, ascending), count, list, pages)));
  await update();
  return update;
}

/** A line of a list of episodes: of all of a run, or (`beside`) of those that belong to the one shown. */
export function result(run, one, sort = "", beside = false) {
  const asked = { run, file: one.file, id: one.name };
  const thumb = one.medium === "picture"
    ? h("img", { src: address("api/thumb", asked), alt: "", loading: "lazy", width: 48, height: 48 })
    : h("span", { "aria-hidden": "true" }, { video: "▶", sound: "♪" }[one.medium] ?? "¶");
  const chip = (name, value, write = number) => value === null || value === undefined ? "" :
    h("span.chip", { class: sort === name ? "by" : "", title: MEANINGS[name] ?? "" }, `${name} `, h("b", {}, write(value)));
  const terms = Object.entries(one.terms).map(([name, value]) => h("span.chip", { class: value === null ? "missing" : "" }, `${name} `, h("b", {}, value === null ? "missing" : number(value))));
  const where = one.log === "train" ? `step ${number(one.step)}` : `${one.log}, step ${number(one.step)}`;
  const chips = [
    !beside && (terms.length > 1 || one.failed) ? terms : "",
    chip("advantage", one.advantage, signed),
    ["surprise", "disagreement"].includes(sort) ? chip(sort, one[sort]) : "",
    sort === "tokens" || beside ? chip("tokens", one.tokens) : "",
    one.turns > 1 ? chip("turns", one.turns) : "",
    one.fate && one.fate !== "trained" ? h("span.chip", {}, one.fate) : "",
    one.status !== "finished" ? h("span.chip.missing", {}, one.status) : "",
  ];
  return h("li", { class: verdict(one.correct) }, h("a", { href: address(`#/run/${run}/episode`, { file: one.file, id: one.name }), "data-id": `${one.file} ${one.name}` },
    beside ? "" : h("span.thumb", {}, thumb),
    h("span.words", {}, beside ? "" : h("span.prompt", {}, one.prompt || one.task), h("span.response", {}, one.response || h("i", {}, "no response")), one.failure ? h("span.failure", {}, one.failure) : ""),
    h("span.numbers", {}, h("span.where", {}, where, one.category && !beside ? ` · ${one.category}` : ""), h("span.chips", {}, chips), h("b.total", {}, number(one.reward)))));
}
