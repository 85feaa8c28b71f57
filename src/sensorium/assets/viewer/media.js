// Media of an episode: pictures with places drawn over them, films, and clips whose frames, waveform and words share a cursor.

import { address, ask, h, number, s, trouble } from "./dom.js";

const SMALL = 160; // pictures of at most so many pixels are enlarged pixel by pixel
const FILM_MS = 500;

/** Where a place lies in a picture of this size, in pixels: [x, y] or [x0, y0, x1, y1]. */
export function located(place, width, height, scale) {
  if (place.of && scale === "auto" && place.kind !== "percent") return place.at.map((value, i) => (value / place.of[i % 2]) * (i % 2 ? height : width));
  const most = Math.max(...place.at);
  const fraction = place.at.some((value) => value % 1) && most <= 1;
  const inside = place.at.every((value, i) => value <= (i % 2 ? height : width));
  const kind = place.kind === "percent" ? "percent" : scale !== "auto" ? scale : fraction ? "1" : inside || most > 1000 ? "pixels" : "1000";
  const whole = { percent: 100, 1: 1, 1000: 1000 }[kind];
  return place.at.map((value, i) => (whole ? (value / whole) * (i % 2 ? height : width) : value));
}

/** A picture that a click enlarges; `places` are drawn over it, in the unit that `scale()` says. */
export function picture(source, words, places = [], scale = () => "auto") {
  const image = h("img", { src: source, alt: words, loading: "lazy" });
  const drawn = s("svg", { class: "places", "aria-hidden": "true" });
  const frame = h("span.frame", {}, image, drawn);
  const draw = () => {
    const { naturalWidth: width, naturalHeight: height } = image;
    if (!width) return;
    if (Math.max(width, height) <= SMALL) image.classList.add("small");
    drawn.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const size = Math.max(width, height) / 100;
    drawn.replaceChildren(...places.map((place, i) => {
      const at = located(place, width, height, scale());
      const shapes = at.length === 4
        ? [s("rect", { x: Math.min(at[0], at[2]), y: Math.min(at[1], at[3]), width: Math.abs(at[2] - at[0]), height: Math.abs(at[3] - at[1]) })]
        : [s("circle", { cx: at[0], cy: at[1], r: 2.6 * size }), s("path", { d: `M${at[0] - 5 * size},${at[1]}h${10 * size}M${at[0]},${at[1] - 5 * size}v${10 * size}` })];
      return s("g", { class: `place p${i % 6}`, "data-place": i }, ...shapes);
    }));
  };
  image.addEventListener("load", draw);
  image.addEventListener("error", () => frame.replaceWith(h("span.absent", {}, `${words}: it cannot be shown`)));
  image.addEventListener("click", () => enlarge(source, words));
  frame.draw = draw;
  return frame;
}

function enlarge(source, words) {
  const box = document.getElementById("box");
  box.className = "large";
  box.replaceChildren(h("img", { src: source, alt: words, click: () => box.close() }));
  box.showModal();
}

/** The pictures of an environment as a film. `asked` names the episode, `shots` have a turn and a picture each. */
export function film(asked, shots, placesOf, wordsOf, scale) {
  const screen = h("div.screen");
  const slider = h("input", { type: "range", min: 0, max: shots.length - 1, value: 0, "aria-label": "picture of the film" });
  const words = h("p.action");
  const clock = h("span.clock");
  const play = h("button", { type: "button", title: "play or pause (Space)" }, "▶");
  const speed = h("select", { "aria-label": "pictures a second" }, [1, 2, 4, 8].map((rate) => h("option", { value: rate, selected: rate === 2 }, `${rate} / s`)));
  const frames = [];
  let at = 0;
  let timer = 0;

  function show(to) {
    at = Math.min(shots.length - 1, Math.max(0, to));
    const shot = shots[at];
    frames[at] ??= picture(address("api/medium", { ...asked, n: shot.medium }), `turn ${shot.turn + 1}`, placesOf(shot.turn), scale);
    const image = frames[at].querySelector("img");
    if (image) image.loading = "eager";
    screen.replaceChildren(frames[at]);
    slider.value = at;
    clock.textContent = `${at + 1} of ${shots.length}`;
    words.replaceChildren(h("b", {}, `turn ${shot.turn + 1}`), " ", wordsOf(shot.turn));
    const next = shots[at + 1];
    if (next) new Image().src = address("api/medium", { ...asked, n: next.medium });
  }

  function pause() {
    clearInterval(timer);
    timer = 0;
    play.textContent = "▶";
  }

  function toggle() {
    if (timer) return pause();
    if (at === shots.length - 1) show(0);
    play.textContent = "❚❚";
    timer = setInterval(() => {
      if (!play.isConnected) return pause();
      show(at + 1);
      if (at === shots.length - 1) pause();
    }, (2 * FILM_MS) / Number(speed.value));
  }

  const step = (by) => {
    pause();
    show(at + by);
  };
  play.addEventListener("click", toggle);
  speed.addEventListener("change", () => timer && (pause(), toggle()));
  slider.addEventListener("input", () => step(Number(slider.value) - at));
  const button = (sign, title, by) => h("button", { type: "button", title, "aria-label": title, click: () => step(by) }, sign);
  show(0);
  const save = (kind) => h("a", { href: address("api/film", { ...asked, kind }), download: "" }, `save as ${kind.toUpperCase()}`);
  const element = h("figure.film", {}, screen,
    h("div.controls", {}, button("|◀", "the picture before (←)", -1), play, button("▶|", "the next picture (→)", 1), slider, clock, speed, save("gif"), save("mp4")), words);
  return { element, step, toggle, show, draw: () => frames.forEach((frame) => frame?.draw()) };
}

/** A video or sound: the file plays, and one cursor moves through it, the frames and the loudness that the model was given. */
export function clip(asked, n, medium, moved) {
  const source = address("api/medium", { ...asked, n });
  const part = medium.start || medium.end !== null ? `#t=${medium.start}${medium.end === null ? "" : `,${medium.end}`}` : "";
  const player = h(medium.kind === "video" ? "video" : "audio", { controls: true, preload: "metadata", src: source + part, "aria-label": medium.kind });
  const given = h("div.given", {}, "decoding…");
  const caption = h("figcaption", {}, medium.origin, medium.augmented ? h("span.augmented", {}, ` augmented: ${medium.augmented}`) : "");
  const element = h("figure.clip", { class: medium.kind, tabindex: 0, "aria-label": `${medium.kind} ${n + 1}` }, player, given, caption);
  const followers = [];
  let now = medium.start;
  let times = [];
  let timer = 0;

  player.addEventListener("error", () => {
    if (!player.isConnected) return;
    const image = h("img.moving", { src: source, alt: medium.kind });
    image.addEventListener("error", () => image.replaceWith(h("p.note", {}, "This browser cannot play the file; below is what the model was given.")));
    player.replaceWith(medium.kind === "video" ? image : h("p.note", {}, "This browser cannot play the file."));
  });
  let placed = NaN; // where a cursor left the file, which then reports it: that moves no cursor
  player.addEventListener("timeupdate", () => same(player.currentTime, placed) || seek(player.currentTime, true));

  function move(time) {
    now = time;
    for (const follower of followers) follower(time);
  }

  /** Bring the file to a time, or to its end if that is before. */
  function place(time) {
    if (!player.isConnected || !player.readyState) return;
    placed = Math.min(time, player.duration);
    if (!same(player.currentTime, placed)) player.currentTime = placed;
  }

  /** Go where the cursor of another clip is: this file, too, unless it or the other one plays. */
  function follow(time, playing) {
    move(time);
    if (!playing && player.paused) place(time);
  }

  function seek(time, playing = false) {
    placed = NaN;
    move(time);
    moved(time, times, playing);
    if (!playing) place(time);
  }

  function step(by) {
    const spots = times.length ? times : [0, now + by * 0.5];
    const at = spots.reduce((best, time, i) => (Math.abs(time - now) < Math.abs(spots[best] - now) ? i : best), 0);
    seek(spots[Math.min(spots.length - 1, Math.max(0, at + by))]);
  }

  function toggle() {
    if (player.isConnected && player.readyState) return player.paused ? player.play() : player.pause();
    if (timer) return (timer = clearInterval(timer));
    timer = setInterval(() => {
      const before = now;
      if (element.isConnected) step(1);
      if (now === before || !element.isConnected) timer = clearInterval(timer);
    }, FILM_MS);
  }

  (async () => {
    try {
      const { parts } = await ask("given", { ...asked, n });
      given.replaceChildren(...parts.flatMap((one) => (one.kind === "video" ? frames(one) : wave(one))));
      seek(parts[0].start, true);
    } catch (error) {
      given.replaceChildren(trouble(error));
    }
  })();

  function frames(one) {
    times = one.times;
    const [wide, high] = one.tile;
    const sheet = new Image();
    const seen = h("canvas.seen", { width: wide, height: high, role: "img", "aria-label": "the frame at the cursor, as the model was given it" });
    const strip = h("div.frames", {}, times.map((time) => {
      const canvas = h("canvas", { width: wide, height: high });
      return h("button", { type: "button", title: `${number(time)} s`, click: () => seek(time) }, canvas, h("span", {}, `${time.toFixed(2)} s`));
    }));
    const nearest = (time) => times.reduce((best, one, i) => (Math.abs(one - time) < Math.abs(times[best] - time) ? i : best), 0);
    const toward = (time) => {
      const at = nearest(time);
      if (sheet.complete && sheet.naturalWidth) seen.getContext("2d").drawImage(sheet, at * wide, 0, wide, high, 0, 0, wide, high);
      [...strip.children].forEach((tile, i) => tile.classList.toggle("at", i === at));
      const tile = strip.children[at];
      if (tile.offsetLeft < strip.scrollLeft || tile.offsetLeft + tile.offsetWidth > strip.scrollLeft + strip.clientWidth) strip.scrollLeft = tile.offsetLeft;
    };
    sheet.onload = () => {
      [...strip.children].forEach((tile, i) => tile.firstChild.getContext("2d").drawImage(sheet, i * wide, 0, wide, high, 0, 0, wide, high));
      toward(now);
    };
    sheet.src = address("api/strip", { ...asked, n });
    followers.push(toward);
    const shown = times.length < one.frames ? `, ${times.length} shown` : "";
    const words = `${one.frames} frame${one.frames === 1 ? "" : "s"} of ${one.width} × ${one.height} from ${span(one)}${shown}`;
    return [seen, h("p.note", {}, "The file, and the frame at the cursor as the model was given it: ", words), strip];
  }

  function wave(one) {
    const most = Math.max(...one.loudness, 1e-6);
    const bars = one.loudness.map((level, i) => `M${4 * i + 2} ${(20 * (1 - level / most)).toFixed(1)}V${(20 * (1 + level / most)).toFixed(1)}`).join("");
    const width = 4 * one.loudness.length;
    const cursor = s("line", { class: "cursor", y1: 0, y2: 40 });
    const drawn = s("svg", { class: "wave", viewBox: `0 0 ${width} 40`, preserveAspectRatio: "none", role: "img",
      "aria-label": `loudness over ${span(one)}, ${number(Math.max(...one.loudness))} at most` }, s("path", { d: bars }), cursor);
    const pointed = (event) => {
      const box = drawn.getBoundingClientRect();
      seek(one.start + Math.min(1, Math.max(0, (event.clientX - box.left) / box.width)) * (one.end - one.start));
    };
    drawn.addEventListener("pointerdown", (event) => {
      drawn.setPointerCapture(event.pointerId);
      pointed(event);
    });
    drawn.addEventListener("pointermove", (event) => drawn.hasPointerCapture(event.pointerId) && pointed(event));
    const clock = h("span.clock");
    followers.push((time) => {
      const x = Math.min(1, Math.max(0, (time - one.start) / (one.end - one.start))) * width;
      cursor.setAttribute("x1", x);
      cursor.setAttribute("x2", x);
      clock.textContent = `${time.toFixed(2)} s`;
    });
    if (!times.length && one.kind === "sound") times = Array.from({ length: 41 }, (_, i) => one.start + ((one.end - one.start) * i) / 40);
    return [h("div.hearing", {}, drawn, clock), h("p.note", {}, `The model heard ${span(one)} at ${one.rate / 1000} kHz. `,
      h("a", { href: address("api/heard", { ...asked, n }), download: `heard-${n + 1}.wav` }, "save what it heard"))];
  }

  return { kind: medium.kind, element, seek, follow, step, toggle };
}

const same = (one, other) => Math.abs(one - other) <= 0.005;

const span = ({ start, end, length }) =>
  start > 0 || end < length ? `${start.toFixed(2)} to ${end.toFixed(2)} of ${length.toFixed(2)} s` : `${(end - start).toFixed(2)} s`;
