// Which page is shown: #/ lists runs, #/run/ID shows one, #/run/ID/episodes?… searches, #/run/ID/episode?… shows one.

import { address, h, trouble } from "./dom.js";
import { showEpisode } from "./episode.js";
import { showRun, showRuns } from "./runs.js";

const main = document.getElementById("main");
const box = document.getElementById("box");
const KEYS = [
  ["/", "search"],
  ["j  ↓", "the next row; of an episode: the next one of the list"],
  ["k  ↑", "the one before"],
  ["Enter", "open it"],
  ["Esc", "leave a field, close, go up"],
  ["←  →", "of a film or clip: a picture back or on; of a list: the page before or the next"],
  ["Space", "of a film or clip: play, pause"],
  ["c", "colour tokens by the next number"],
  ["w", "of an episode: ask what if"],
  ["?", "these keys"],
];

/** One visit to a page: what it asks and follows ends when another page is shown. */
class Visit {
  constructor(parts, asked) {
    this.parts = parts;
    this.asked = asked;
    this.main = main;
    this.keys = {};
    this.ending = new AbortController();
    this.signal = this.ending.signal;
  }

  get ended() {
    return this.signal.aborted;
  }

  /** The way from the list of runs to here: names with their addresses; the last one is this page. */
  way(...steps) {
    document.title = ["Sensorium", ...steps.map(([name]) => name)].join(" · ");
    const links = steps.map(([name, to]) => (to ? h("a", { href: to }, name) : h("span", { "aria-current": "page" }, name)));
    document.getElementById("path").replaceChildren(...links);
  }

  /** Show these elements, unless another page is shown by now. */
  show(...elements) {
    if (!this.ended) main.replaceChildren(...elements);
  }

  /** Call `changed` whenever a run (any without one) has changed, while the page is seen, with whether it goes on. */
  follow(run, changed) {
    const light = document.getElementById("live");
    let source = null;
    const open = () => {
      source?.close();
      source = null;
      if (document.hidden || this.ended) return;
      source = new EventSource(address("api/events", { run }));
      source.onmessage = (event) => {
        const seen = JSON.parse(event.data);
        const running = run ? seen.alive : seen.runs.some((one) => one.alive);
        light.className = running ? "on" : "";
        light.textContent = running ? "live" : "";
        changed(running);
      };
      source.onerror = () => {
        light.className = "off";
        light.textContent = "no connection";
      };
    };
    document.addEventListener("visibilitychange", open, { signal: this.signal });
    this.signal.addEventListener("abort", () => {
      source?.close();
      light.className = light.textContent = "";
    });
    open();
  }
}

let visit = null;

async function go() {
  visit?.ending.abort();
  if (box.open) box.close();
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  visit = new Visit(path.split("/").filter(Boolean), new URLSearchParams(query));
  const mine = visit;
  window.scrollTo(0, 0);
  try {
    const [first, , third] = mine.parts;
    if (first !== "run") await showRuns(mine);
    else if (third === "episode") await showEpisode(mine);
    else await showRun(mine);
  } catch (error) {
    if (error.name !== "AbortError") mine.show(trouble(error), h("p", {}, h("a", { href: "#/" }, "All runs")));
  }
}

function showKeys() {
  const rows = KEYS.map(([key, words]) => h("tr", {}, h("th", {}, h("kbd", {}, key)), h("td", {}, words)));
  box.className = "keys";
  box.replaceChildren(h("h2", {}, "Keys"), h("table", {}, h("tbody", {}, rows)));
  box.showModal();
}

function up() {
  const { parts } = visit;
  const list = visit.list ?? "";
  location.hash = parts[2] === "episode" ? list || `#/run/${parts[1]}/episodes` : "#/";
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || box.open) return;
  const field = event.target.closest("input, select, textarea");
  if (field) {
    if (event.key === "Escape") field.blur();
    return;
  }
  const work = visit.keys[event.key] ?? { "?": showKeys, Escape: up, "/": () => main.querySelector("input[type=search]")?.focus() }[event.key];
  if (!work || (event.key === " " && event.target.closest("button, a, video, audio"))) return;
  event.preventDefault();
  work();
});
box.addEventListener("click", (event) => event.target === box && box.close());
document.getElementById("help").addEventListener("click", showKeys);
window.addEventListener("hashchange", go);
go();
