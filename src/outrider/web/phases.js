/* The phases of the steps around the cursor: a lane for each, and one for the plain passes of that time. */

import { prepare, ticksOf } from "./canvas.js";
import { UNKNOWN, colour, el, micros } from "./dom.js";
import { passAt } from "./trace.js";

const LANES = ["draft", "verify", "overlap", "judge", "host"];
const AROUND = 3; // steps before and after the current one
const LEFT = 66,
  ROW = 22,
  GAP = 6;

export function mountPhases(run) {
  const canvas = el("canvas", { class: "zoom", role: "img", "aria-label": "Phases of the steps around this one" });
  const note = el("p", { class: "note" });
  const element = el(
    "figure",
    { class: "figure phases" },
    el("p", { class: "title" }, "Phases of the steps around this one"),
    canvas,
    note,
  );
  let at = 0,
    width = 0;

  function seek(step) {
    at = step;
    const found = run.race();
    canvas.hidden = !found;
    note.textContent = found ? describe(run, step) : `The clock of this run is ${UNKNOWN}.`;
    if (found && width >= 1) drawZoom(canvas, width, run, found, step);
  }

  const draw = () => run.steps.length && seek(at);
  const watcher = new ResizeObserver(() => ((width = element.clientWidth), requestAnimationFrame(draw)));
  watcher.observe(element);
  return { element, seek, draw, destroy: () => watcher.disconnect() };
}

function describe(run, at) {
  const { us } = run.steps[at];
  return `Step ${at + 1}: ${LANES.filter((lane) => us[lane])
    .map((lane) => `${lane} ${micros(us[lane][1])}`)
    .join(", ")}.`;
}

function drawZoom(canvas, width, run, found, at) {
  const steps = run.steps.slice(Math.max(0, at - AROUND), at + AROUND + 1);
  const zero = run.steps[0].us.verify[0] + run.steps[0].us.verify[1];
  const spans = steps.flatMap((step) => Object.values(step.us));
  const from = Math.min(...spans.map((span) => span[0])),
    to = Math.max(...spans.map((span) => span[0] + span[1]));
  const lanes = LANES.filter((lane) => steps.some((step) => step.us[lane]));
  const rows = [...lanes, ...(found.plain ? ["plain"] : [])];
  const height = rows.length * (ROW + GAP) + 26,
    pen = prepare(canvas, width, height);
  const x = (moment) => LEFT + ((moment - from) / (to - from || 1)) * (width - LEFT - 12);
  const bars = steps.flatMap((step) =>
    lanes.filter((lane) => step.us[lane]).map((lane) => ({ lane, span: step.us[lane], now: step.index === at })),
  );
  if (found.plain) bars.push(...plainBars(found.plain.passes, from - zero, to - zero, zero));
  rows.forEach((lane, row) => {
    pen.fillStyle = colour("ink");
    pen.fillText(lane, 0, row * (ROW + GAP) + ROW / 2);
    pen.fillStyle = colour("line");
    pen.fillRect(LEFT, row * (ROW + GAP) + ROW + 2, width - LEFT - 12, 1);
  });
  for (const bar of bars) zoomBar(pen, bar, rows.indexOf(bar.lane) * (ROW + GAP), x, width);
  pen.fillStyle = colour("ink-2");
  for (const tick of ticksOf(0, to - from || 1, width - LEFT))
    pen.fillText(tick ? micros(tick) : "0", Math.min(x(from + tick), width - 48), height - 8);
}

function plainBars(passes, from, to, zero) {
  const bars = [];
  for (let i = passAt(passes, from); i < passes.length && passes[i].start < to; i++)
    if (passes[i].at > from) bars.push({ lane: "plain", span: [passes[i].start + zero, passes[i].lasted], now: true });
  return bars;
}

function zoomBar(pen, { lane, span, now }, top, x, width) {
  const left = Math.max(LEFT, x(span[0])),
    right = Math.min(width - 12, Math.max(x(span[0] + span[1]), x(span[0]) + 1.5));
  pen.globalAlpha = now ? 1 : 0.4;
  pen.fillStyle = colour(lane);
  pen.fillRect(left, top, right - left, ROW);
  pen.globalAlpha = 1;
  const label = micros(span[1]);
  if (now && right - left > pen.measureText(label).width + 8) {
    pen.fillStyle = colour("on-lane");
    pen.fillText(label, left + 4, top + ROW / 2);
  }
}
