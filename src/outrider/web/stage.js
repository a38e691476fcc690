/* The stage: a run on one time axis, to scale. Above, speculative decoding: the drafter's bars with their tokens below
   them, and the target's bar that sweeps over them; below, the passes of plain decoding.

   mountStage(run) -> {element, show(frame), destroy()}      a frame is one of story.js
   canvas.shapes is what was drawn last, with the moments (microseconds) that its edges stand for.

   A draft's duration is measured as a whole: its tokens are spaced evenly inside it. */

import { prepare, ticksOf } from "./canvas.js";
import { UNKNOWN, colour, el, label, micros, plural } from "./dom.js";
import { median, passAt } from "./trace.js";

const HEIGHT = 296;
const ROWS = 8, // drafted tokens of a step that are drawn
  ROW = 20,
  TOP = 62, // of the first row
  BAR = 14;
const Y = { axis: 10, own: 33, draft: 44, verify: TOP + ROWS * ROW + 2, plain: 257, passes: 268 };
const NARROW = 72; // pixels of a typical step below which tokens are blocks without text
const CHARACTER = 7.3; // pixels, of the 12px monospace font; measured once

export function mountStage(run) {
  const line = timeline(run);
  const canvas = el("canvas", {
    class: "stage",
    role: "img",
    "aria-label": "Both runs on one time axis, drawn to scale; the same in words and numbers is below",
  });
  const element = el("div", { class: "board" }, canvas);
  let width = 0,
    frame = null;

  function draw() {
    if (width < 1 || !frame) return;
    canvas.shapes = shapes(run, line, frame, width);
    paint(prepare(canvas, width, HEIGHT), canvas.shapes);
  }

  const watcher = new ResizeObserver(() => ((width = element.clientWidth), requestAnimationFrame(draw)));
  watcher.observe(element);
  const recolour = () => requestAnimationFrame(draw);
  document.addEventListener("outrider:theme", recolour);
  return {
    element,
    show: (next) => ((frame = next), draw()),
    destroy: () => (watcher.disconnect(), document.removeEventListener("outrider:theme", recolour)),
  };
}

/** Every step after the prompt's pass with its moments, and the plain passes. */
function timeline(run) {
  const { own, plain } = run.race();
  const steps = own
    .slice(1)
    .map((pass, i) => ({ ...pass, step: run.steps[i + 1], from: pass.draft?.[0] ?? pass.start }));
  return { steps, own, plain: plain?.passes ?? null, typical: median(steps.map((each) => each.at - each.from)) };
}

/* ---------------------------------------------------------------- what is to be seen */

function shapes(run, line, { t, left, width: span }, width) {
  const scale = width / span,
    x = (moment) => (moment - left) * scale,
    right = left + span;
  const made = ticksOf(left, span, width).map((at) => ({
    kind: "tick",
    at,
    x: x(at),
    y: Y.axis,
    h: HEIGHT - 20,
    text: at ? micros(at) : "0",
  }));
  const count = (passes) => plural(passes[passAt(passes, t)].tokens, "token");
  made.push({ kind: "title", x: 6, y: Y.own, text: `speculative: ${count(line.own)}` });
  const wide = line.typical * scale >= NARROW;
  for (const each of line.steps)
    if (each.at > left && each.from < Math.min(right, t)) addStep(made, run, each, wide, t, x);
  made.push({ kind: "title", x: 6, y: Y.plain, text: `plain: ${line.plain ? count(line.plain) : UNKNOWN}` });
  for (const pass of line.plain?.slice(1) ?? [])
    if (pass.at > left && pass.start < Math.min(right, t)) addPass(made, run, pass, t, x);
  made.push({ kind: "now", x: x(t), y: 20, h: HEIGHT - 20 });
  return made;
}

function bar(kind, from, to, t, x, more) {
  return { kind, from, to, x: x(from), w: x(Math.min(to, t)) - x(from), ...more };
}

function addStep(made, run, { step, draft, start, at: stop, from }, wide, t, x) {
  const done = t >= stop;
  const sweep = () =>
    wide && t > start && made.push(bar("sweep", start, stop, t, x, { y: Y.draft, h: Y.verify - Y.draft }));
  if (draft) made.push(bar("draft", ...draft, t, x, { y: Y.draft, h: BAR }));
  if (done) sweep(); // what is decided lies above it
  if (wide) addChips(made, run, step, draft, { from, stop, done }, t, x);
  else if (done) addBlocks(made, step, x(start), x(stop));
  if (!done) sweep();
  if (t <= start) return;
  made.push(
    bar("verify", start, stop, t, x, {
      y: Y.verify,
      h: BAR,
      text: wide && done ? `one pass, ${micros(stop - start)}` : "",
    }),
  );
  if (wide && done && step.emitted.length > step.accepted) addOwn(made, run, step, { from, stop }, x);
}

/** A row for each drafted token, from when it was drafted to the end of the pass that decides about it: siblings of a
    tree never read as one line of text. */
function addChips(made, run, step, draft, { from, stop, done }, t, x) {
  const each = draft ? (draft[1] - draft[0]) / step.nodes.length : 0;
  step.nodes.slice(0, ROWS).forEach((node, i) => {
    const begun = from + (i + 1) * each;
    if (t < begun) return;
    const state = done ? ({ a: "accepted", r: "rejected" }[node.fate] ?? "unreached") : "drafted";
    made.push(bar("chip", begun, stop, t, x, { state, text: run.piece(node.token), y: TOP + i * ROW, h: ROW - 3 }));
  });
}

/** The target's own token, at the end of its pass, in the row of the miss or below the last accepted one. */
function addOwn(made, run, step, { from, stop }, x) {
  const nodes = step.nodes.slice(0, ROWS),
    missed = nodes.findIndex((node) => node.fate === "r" && node.depth === step.accepted),
    row = missed >= 0 ? missed : Math.min(nodes.length, ROWS - 1),
    text = run.piece(step.emitted.at(-1));
  const w = Math.min(0.42 * (x(stop) - x(from)), textWidth(text));
  made.push({
    kind: "chip",
    state: "bonus",
    text,
    from: stop,
    to: stop,
    x: x(stop) - w,
    y: TOP + row * ROW,
    h: ROW - 3,
    w,
  });
}

const textWidth = (text) => Math.max(20, [...label(text, 14)].length * CHARACTER + 14);

/** The width of a bar with a gap to the next one, where there is room for a gap. */
const apart = (w) => (w > 4 ? w - 1 : w);

/** From far away: a block for each emitted token and for each that was drafted in vain. */
function addBlocks(made, step, left, right) {
  const w = apart(right - left),
    block = (row, state) => made.push({ kind: "block", state, x: left, y: TOP + row * ROW, w, h: ROW - 3 });
  for (let row = 0; row < Math.min(ROWS, step.emitted.length); row++)
    block(row, row < step.accepted ? "accepted" : "bonus");
  const vain = Math.min(ROWS, step.emitted.length + step.nodes.length - step.accepted);
  for (let row = step.emitted.length; row < vain; row++) block(row, "rejected");
}

function addPass(made, run, pass, t, x) {
  const whole = bar("plain", pass.start, pass.at, t, x, { y: Y.passes, h: ROW }),
    token = t >= pass.at ? tokenAt(run, pass.tokens - 1) : null;
  made.push({
    ...whole,
    text: token !== null && whole.w > 26 ? label(token, Math.max(1, Math.floor((whole.w - 8) / CHARACTER))) : "",
  });
}

/** The text of the n-th token: the same in both runs. */
function tokenAt(run, n) {
  if (run.emittedPieces?.version !== run.version)
    run.emittedPieces = { version: run.version, list: run.steps.flatMap((step) => step.emitted) };
  const id = run.emittedPieces.list[n];
  return id === undefined ? null : run.piece(id);
}

/* ---------------------------------------------------------------- drawing */

const PAINT = {
  tick(pen, { x, y, h, text }) {
    pen.fillStyle = colour("line");
    pen.fillRect(x, 20, 1, h);
    pen.fillStyle = colour("ink-2");
    pen.textAlign = x < 24 ? "left" : "center";
    pen.fillText(text, x < 24 ? Math.max(2, x - 4) : x, y);
    pen.textAlign = "left";
  },
  title(pen, { x, y, text }) {
    pen.fillStyle = colour("ink");
    pen.fillText(text, x, y);
  },
  draft: (pen, shape) => box(pen, shape, "draft", 1),
  sweep: (pen, shape) => box(pen, shape, "verify", 0.2),
  verify: (pen, shape) => (box(pen, shape, "verify", 1), caption(pen, shape)),
  plain: (pen, shape) => (box(pen, { ...shape, w: apart(shape.w) }, "plain", 1), caption(pen, shape)),
  block: (pen, shape) =>
    box(
      pen,
      shape,
      { accepted: "accepted", bonus: "verify", rejected: "rejected" }[shape.state],
      shape.state === "rejected" ? 0.45 : 1,
    ),
  now(pen, { x, y, h }) {
    pen.fillStyle = colour("accent");
    pen.fillRect(x - 1, y, 2, h);
  },
  chip,
};

function paint(pen, made) {
  for (const shape of made) PAINT[shape.kind](pen, shape);
}

function box(pen, { x, y, w, h }, hue, alpha) {
  pen.globalAlpha = alpha;
  pen.fillStyle = colour(hue);
  pen.fillRect(x, y, Math.max(w, 1), h);
  pen.globalAlpha = 1;
}

function caption(pen, { x, y, w, h, text }) {
  const from = Math.max(x, 0); // of a bar that begins left of the stage the rest is labelled
  if (!text || x + w - from < text.length * CHARACTER + 4) return;
  pen.fillStyle = colour("on-lane");
  pen.fillText(text, from + 4, y + h / 2 + 0.5);
}

/** As the chips in the page: drafted dashed, accepted filled, rejected struck out, the target's own outlined. */
function chip(pen, { x, y, w, h, text, state }) {
  const fill = { accepted: "accepted-fill", rejected: "rejected-fill", drafted: "drafted-fill" }[state] ?? "card",
    ink = state === "accepted" ? "ink" : state;
  pen.fillStyle = colour(fill);
  pen.strokeStyle = colour(state);
  pen.lineWidth = state === "bonus" ? 2 : 1.2;
  pen.setLineDash(state === "drafted" ? [4, 3] : state === "unreached" ? [2, 3] : []);
  pen.beginPath();
  pen.roundRect(x + 1, y, Math.max(w - 2, 2), h, 5);
  pen.fill();
  pen.stroke();
  pen.setLineDash([]);
  const room = Math.floor((w - 12) / CHARACTER);
  if (room < 1) return;
  const shown = label(text, Math.min(room, 14));
  pen.fillStyle = colour(ink);
  pen.fillText(shown, x + 7, y + h / 2 + 0.5);
  const thick = { rejected: 2, unreached: 1 }[state];
  if (thick) pen.fillRect(x + 5, y + h / 2, [...shown].length * CHARACTER + 4, thick);
}
