/* Time: the race against the plain run on one clock, and the phases of each step in microseconds.

   The race shows both whole runs, from the end of each prompt pass to the finish. The lanes below show the steps around
   the cursor. What never changes is drawn once and kept. */

import { UNKNOWN, colour, el, micros, plural, replace, times } from "./dom.js";

const LANES = ["draft", "verify", "overlap", "judge", "host"];
const SAME = new Map([
  [true, ", the same text"],
  [false, ", but a different text"],
  [null, ""],
]); // as recorded
const AROUND = 3; // steps before and after the current one
const LEFT = 66,
  ROW = 22,
  GAP = 6;

export function mountLanes(run, { onseek }) {
  const race = el("canvas", { class: "race", role: "img", "aria-label": "The race against the plain run" });
  const zoom = el("canvas", {
    class: "zoom",
    role: "img",
    "aria-label": "Microseconds of the steps around the cursor",
  });
  const result = el("p", { class: "result", "data-number": "speedup" });
  const note = el("p", { class: "note", "aria-live": "off" });
  const element = el(
    "section",
    { class: "panel lanes", "aria-label": "The race" },
    el("h3", {}, "The race against plain decoding"),
    result,
    race,
    el("h4", {}, "Phases of the steps around this one"),
    zoom,
    note,
  );
  let background = null,
    at = 0,
    width = 0; // reading the width makes the browser lay out the page: once is enough

  race.addEventListener("click", (event) => {
    const found = run.race();
    if (!found) return;
    const box = race.getBoundingClientRect();
    const moment = ((event.clientX - box.left - LEFT) / (box.width - LEFT - 12)) * raceEnd(found);
    onseek(passAt(found.own, moment));
  });

  function draw() {
    const found = run.race();
    replace(result, sentence(run, found));
    background = null;
    seek(at);
  }

  function seek(step) {
    at = step;
    const found = run.race();
    race.hidden = zoom.hidden = !found;
    if (!found) return void (note.textContent = `The clock of this run is ${UNKNOWN}.`);
    if (!(width >= 1)) return; // not on screen, or not laid out yet
    background ??= drawBackground(race, width, found);
    drawRace(race, width, background, found, step);
    drawZoom(zoom, width, run, found, step);
    note.textContent = describe(run, found, step);
  }

  const watcher = new ResizeObserver(() => {
    width = element.clientWidth - 2 * parseFloat(getComputedStyle(element).paddingLeft);
    if (run.steps.length) requestAnimationFrame(draw);
  });
  watcher.observe(element);
  return { element, seek, draw, destroy: () => watcher.disconnect() };
}

const raceEnd = (found) => Math.max(found.ownEnd, found.plain?.end ?? 0) || 1;

/** The index of the last pass that had ended at this moment. */
export function passAt(passes, moment) {
  let low = 0,
    high = passes.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (passes[middle].at <= moment) low = middle;
    else high = middle - 1;
  }
  return low;
}

function sentence(run, found) {
  if (!found) return "";
  if (!found.plain)
    return `${plural(found.tokens, "token")} in ${micros(found.ownEnd)} after the prompt’s pass. The plain run is ${UNKNOWN}; \`--trace FILE --compare\` records it.`;
  const speed = run.speedup();
  const ratio = el("strong", {}, times(speed));
  return [
    ratio,
    ` the plain speed${speed < 1 ? " (slower than plain)" : ""}: ${plural(found.tokens, "token")} in ${micros(found.ownEnd)} against ${micros(found.plain.end)}${SAME.get(found.plain.same)}.`,
  ];
}

function describe(run, found, at) {
  const step = run.steps[at],
    own = found.own[at];
  const phases = LANES.filter((lane) => step.us[lane]).map((lane) => `${lane} ${micros(step.us[lane][1])}`);
  const ahead = found.plain
    ? ` At this moment this run had ${plural(own.tokens, "token")}, the plain run ${plural(found.plain.passes[passAt(found.plain.passes, own.at)].tokens, "token")}.`
    : "";
  return `Step ${at + 1}: ${phases.join(", ")}.${ahead}`;
}

/* ---------------------------------------------------------------- the race */

function prepare(canvas, width, height) {
  const scale = devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = `12px ${colour("mono")}`;
  pen.textBaseline = "middle";
  return pen;
}

/** What does not move: both tracks, their passes, the finish lines. */
function drawBackground(canvas, width, found) {
  const height = 118,
    pen = prepare(canvas, width, height);
  const x = (moment) => LEFT + (moment / raceEnd(found)) * (width - LEFT - 12);
  const tracks = [
    ["Outrider", found.own, found.ownEnd, "verify"],
    ["plain", found.plain?.passes, found.plain?.end, "plain"],
  ];
  const dense = Math.max(
    1,
    Math.ceil(Math.max(found.own.length, found.plain?.passes.length ?? 0) / ((width - LEFT) / 3)),
  );
  tracks.forEach(([name, passes, end, hue], row) => {
    const top = 22 + row * 36;
    pen.fillStyle = colour("ink");
    pen.fillText(name, 0, top + 13);
    if (!passes) return void pen.fillText(UNKNOWN, LEFT, top + 13);
    pen.globalAlpha = 0.22;
    pen.fillStyle = colour(hue);
    pen.fillRect(LEFT, top, x(end) - LEFT, 26);
    pen.globalAlpha = 1;
    pen.fillStyle = colour("paper");
    passes.forEach((pass, i) => i % dense === 0 && pen.fillRect(x(pass.at) - 0.5, top, 1, 26));
    finish(pen, x(end), top, hue);
  });
  axis(pen, x, raceEnd(found), width, height);
  const kept = document.createElement("canvas");
  kept.width = canvas.width;
  kept.height = canvas.height;
  kept.getContext("2d").drawImage(canvas, 0, 0);
  return { kept, x, tracks };
}

function finish(pen, x, top, hue) {
  pen.strokeStyle = colour(hue);
  pen.lineWidth = 2;
  pen.setLineDash([4, 3]);
  pen.beginPath();
  pen.moveTo(x, top - 6);
  pen.lineTo(x, top + 32);
  pen.stroke();
  pen.setLineDash([]);
  for (let i = 0; i < 6; i++) {
    pen.fillStyle = colour(i % 2 ? "paper" : "ink");
    pen.fillRect(x + (i % 3) * 4 - 12, top - 10 + Math.floor(i / 3) * 4, 4, 4);
  }
}

function axis(pen, x, end, width, height) {
  pen.fillStyle = colour("ink-2");
  const raw = end / Math.max(2, Math.floor((width - LEFT) / 110)),
    power = 10 ** Math.floor(Math.log10(raw));
  const tick = [1, 2, 5, 10].map((m) => m * power).find((each) => each >= raw);
  pen.textAlign = "center";
  for (let moment = 0; moment <= end; moment += tick)
    pen.fillText(micros(moment).replace("0 µs", "0"), Math.min(x(moment), width - 24), height - 8);
  pen.textAlign = "left";
}

function drawRace(canvas, width, { kept, x, tracks }, found, at) {
  const pen = prepare(canvas, width, 118);
  pen.save();
  pen.setTransform(1, 0, 0, 1, 0, 0);
  pen.drawImage(kept, 0, 0);
  pen.restore();
  const now = found.own[at].at;
  tracks.forEach(([, passes, end, hue], row) => {
    if (!passes) return;
    const done = passes[passAt(passes, now)],
      top = 22 + row * 36;
    pen.fillStyle = colour(hue);
    pen.globalAlpha = 0.75;
    pen.fillRect(LEFT, top + 4, x(Math.max(0, Math.min(done.at, end))) - LEFT, 18);
    pen.globalAlpha = 1;
    pen.fillStyle = colour("ink");
    const label = `${done.tokens} tokens`,
      right = Math.max(x(Math.min(done.at, end)), x(now)) + 8;
    pen.fillText(label, right + 80 > x(raceEnd(found)) ? x(raceEnd(found)) - 86 : right, top + 13);
  });
  cursor(pen, x(now), 10, 98);
}

function cursor(pen, x, top, bottom) {
  pen.strokeStyle = colour("accent");
  pen.lineWidth = 2;
  pen.beginPath();
  pen.moveTo(x, top);
  pen.lineTo(x, bottom);
  pen.stroke();
}

/* ---------------------------------------------------------------- around the cursor */

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
  axis(pen, (moment) => LEFT + (moment / (to - from || 1)) * (width - LEFT - 12), to - from, width, height);
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
