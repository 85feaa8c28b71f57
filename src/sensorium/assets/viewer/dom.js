// Elements, numbers and requests. All text of a run becomes text nodes: nothing that it holds is parsed as markup.

const SVG = "http://www.w3.org/2000/svg";

/** An element: h("a.row", { href: "#/" }, "text", child). Functions among the attributes listen to the event of that name. */
export function h(kind, attributes = {}, ...children) {
  const [name, ...classes] = kind.split(".");
  const made = document.createElement(name || "div");
  made.className = classes.join(" ");
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") made.addEventListener(key, value);
    else if (key === "class") made.className = `${made.className} ${value}`.trim();
    else made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.flat(2).filter((child) => child !== null && child !== undefined && child !== false && child !== ""));
  return made;
}

/** An element of a drawing. */
export function s(name, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

const DRAWN = new Set(["figure", "figcaption", "b", "i", "span", "div", "svg", "g", "path", "line", "circle", "text"]);
const KEPT = new Set(["class", "d", "x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "r", "viewBox", "role", "aria-label",
  "text-anchor", "visibility", "hidden", "data-chart"]);

/** A chart of the server's: of its markup only the elements and attributes of drawings are copied. */
export function drawing(markup) {
  const copy = (node) => {
    if (node.nodeType === Node.TEXT_NODE) return document.createTextNode(node.data);
    if (node.nodeType !== Node.ELEMENT_NODE || !DRAWN.has(node.localName)) return "";
    const made = document.createElementNS(node.namespaceURI, node.localName);
    for (const { name, value } of node.attributes) if (KEPT.has(name)) made.setAttribute(name, value);
    made.append(...Array.from(node.childNodes, copy));
    return made;
  };
  return copy(new DOMParser().parseFromString(markup, "text/html").body.firstChild);
}

/** The address of a request; parameters that are empty are left out. */
export function address(path, asked = {}) {
  const given = Object.entries(asked).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return given.length ? `${path}?${new URLSearchParams(given)}` : path;
}

let press = Promise.resolve(); // done when nothing is pressed any longer
let release = () => {};
/** For how many milliseconds answers have waited for the end of a press. */
export const presses = { ms: 0 };

document.addEventListener("pointerdown", (event) => {
  release();
  const pressed = event.target.closest("a, button, label, summary, select");
  if (event.button === 2 || !pressed || pressed.localName === "select") return; // menus may take the release
  press = new Promise((done) => (release = () => setTimeout(done))); // in a later task than the click
}, true);
for (const end of ["pointerup", "pointercancel", "click", "contextmenu", "keydown"]) document.addEventListener(end, () => release(), true);
document.addEventListener("pointermove", (event) => event.buttons || release(), true); // released outside of the page

/** Wait while a link or a button is pressed: drawn again between press and release, it would not be clicked. */
async function unpressed() {
  const began = performance.now();
  for (let seen; seen !== press;) await (seen = press);
  presses.ms += performance.now() - began;
}

/** The answer to a request, or an error with what is wrong in words; neither comes while a link or a button is pressed. */
export async function ask(path, asked = {}, signal = undefined) {
  let answer, found;
  try {
    answer = await fetch(address(`api/${path}`, asked), { signal });
    found = await answer.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error(answer ? `The answer ${answer.status} cannot be read.` : "The viewer does not answer: start 'sensorium view' again, and open the address that it prints.");
  } finally {
    await unpressed();
  }
  signal?.throwIfAborted();
  if (!answer.ok) throw new Error(found.problem ?? `The answer is ${answer.status}.`);
  return found;
}

/** Ask by POST; `say` gets what is done meanwhile. The answer's last line is the result, or what is wrong in words. */
export async function post(path, body, say, signal) {
  let answer;
  try {
    answer = await fetch(`api/${path}`, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal });
    if (!answer.ok) throw new Error((await answer.json().catch(() => ({}))).problem ?? `The answer is ${answer.status}.`);
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let rest = ""; ;) {
      const { value, done } = await reader.read();
      const lines = (rest + (value ?? "")).split("\n");
      rest = lines.pop();
      for (const { state, problem, result } of lines.map((line) => JSON.parse(line))) {
        if (problem !== undefined) throw new Error(problem);
        if (result !== undefined) {
          await unpressed();
          signal?.throwIfAborted();
          return result;
        }
        say(state);
      }
      if (done) throw new Error("The viewer ended before it had answered.");
    }
  } catch (error) {
    if (error instanceof TypeError) throw new Error("The viewer does not answer: start 'sensorium view' again, and open the address that it prints.");
    throw error;
  }
}

/** A number in at most four digits; what is not there is a dash. */
export function number(value, digits = 3) {
  if (value === null || value === undefined || value === "") return "–";
  if (typeof value !== "number") return String(value); // not finite: its name
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  return size >= 0.001 && size < 10_000 ? String(Number(value.toPrecision(digits))) : value.toExponential(1);
}

export const signed = (value) => (typeof value === "number" && value > 0 ? `+${number(value)}` : number(value));

/** "3 turns". */
export const counted = (count, word) => `${number(count)} ${word}${count === 1 ? "" : "s"}`;

/** How long ago a time of the server's clock was. */
function ago(at) {
  const seconds = Math.max(0, Date.now() / 1000 - at);
  const [size, word] = [[86_400, "day"], [3600, "hour"], [60, "minute"]].find(([length]) => seconds >= length) ?? [1, "second"];
  return at ? `${counted(Math.floor(seconds / size), word)} ago` : "";
}

/** The same on the page, where it is counted on each second. */
export const since = (at) => h("time", { "data-at": at }, ago(at));

setInterval(() => {
  for (const one of document.querySelectorAll("time[data-at]")) {
    const words = ago(Number(one.dataset.at));
    if (one.textContent !== words) one.textContent = words;
  }
}, 1000);

/** Calls `work` once it was not asked for during so many milliseconds. */
export function later(work, wait) {
  let timer = 0;
  return (...given) => {
    clearTimeout(timer);
    timer = setTimeout(() => work(...given), wait);
  };
}

/** A paragraph that says what went wrong. */
export const trouble = (error) => h("p.trouble", { role: "alert" }, error.message ?? String(error));

/** Right, wrong or neither, as a class of the report. */
export const verdict = (correct) => (correct === true || correct === 1 ? "right" : correct === false || correct === 0 ? "wrong" : "open");
