/* The race: both runs on one clock, from the end of each prompt pass to the finish.

   mountRace(find, {onseek}) -> {element, draw(), seek(step), destroy()}
   find() returns a race as run.race() does, or null; `racing` marks one that is not over.
   The step null is the end of the race.
   What never changes is drawn once and kept. */

import { prepare, ticksOf } from "./canvas.js";
import { UNKNOWN, colour, el, micros, plural, times } from "./dom.js";
import { passAt } from "./trace.js";

const SAME = new Map([
  [true, ", the same text"],
  [false, ", but a different text"],
  [null, ""],
]); // as recorded
const HEIGHT = 108,
  LEFT = 88,
  RIGHT = 12,
  TOP = 16,
  ROW = 26,
  PITCH = 34;

export function mountRace(find, { onseek = null } = {}) {
  const canvas = el("canvas", { class: "race", role: "img", "aria-label": "The race against plain decoding" });
  const element = el("div", { class: "track" }, canvas);
  let background = null,
    at = 0,
    width = 0; // reading the width makes the browser lay out the page: once is enough
  if (onseek)
    canvas.addEventListener("click", (event) => {
      const found = find();
      if (found) onseek(passAt(found.own, ((event.offsetX - LEFT) / (width - LEFT - RIGHT)) * endOf(found)));
    });

  function draw() {
    background = null;
    seek(at);
  }

  function seek(step) {
    at = step;
    const found = find();
    element.hidden = !found;
    if (!found || width < LEFT + 40) return; // no clock, or not on screen
    background ??= drawBackground(canvas, width, found);
    drawMoment(canvas, width, background, found, step === null ? endOf(found) : found.own[step].at);
  }

  const watcher = new ResizeObserver(() => ((width = element.clientWidth), requestAnimationFrame(draw)));
  watcher.observe(element);
  return { element, seek, draw, destroy: () => watcher.disconnect() };
}

const endOf = (found) => Math.max(found.ownEnd, found.plain?.end ?? 0) || 1;

/** The result in one sentence. */
export function sentence(run) {
  const found = run.race();
  if (!found) return [`The clock of this run is ${UNKNOWN}.`];
  if (!found.plain)
    return [
      `${plural(found.tokens, "token")} in ${micros(found.ownEnd)} after the prompt’s pass. The plain run is ${UNKNOWN}; \`--trace FILE --compare\` records it.`,
    ];
  const speed = run.speedup();
  return [
    el("strong", {}, times(speed)),
    ` the plain speed${speed < 1 ? " (slower than plain)" : ""}: ${plural(found.tokens, "token")} in ${micros(found.ownEnd)} against ${micros(found.plain.end)}${SAME.get(found.plain.same)}.`,
  ];
}

/** What does not move: the bars of drafter and target, the plain passes, the finish lines. */
function drawBackground(canvas, width, found) {
  const pen = prepare(canvas, width, HEIGHT);
  const x = (moment) => LEFT + (moment / endOf(found)) * (width - LEFT - RIGHT);
  const bars = (passes, top, hue, span) => {
    pen.fillStyle = colour(hue);
    for (const pass of passes) {
      const [from, to] = span(pass) ?? [0, 0];
      const left = x(Math.max(0, from)),
        wide = x(to) - left;
      if (wide > 0) pen.fillRect(left, top, wide > 4 ? wide - 1 : wide, ROW); // with a gap, where there is room for one
    }
  };
  ["speculative", "plain"].forEach((name, row) => {
    pen.fillStyle = colour("ink");
    pen.fillText(name, 0, TOP + row * PITCH + ROW / 2);
  });
  bars(found.own.slice(1), TOP, "verify", (pass) => [pass.start, pass.at]);
  bars(found.own.slice(1), TOP, "draft", (pass) => pass.draft);
  if (!found.racing) finish(pen, x(found.ownEnd), TOP);
  if (found.plain) {
    bars(found.plain.passes.slice(1), TOP + PITCH, "plain", (pass) => [pass.start, pass.at]);
    if (!found.racing) finish(pen, x(found.plain.end), TOP + PITCH);
  } else if (!found.racing) pen.fillText(UNKNOWN, LEFT, TOP + PITCH + ROW / 2);
  pen.fillStyle = colour("ink-2");
  pen.textAlign = "center";
  for (const tick of ticksOf(0, endOf(found), width - LEFT))
    pen.fillText(tick ? micros(tick) : "0", Math.min(x(tick), width - 26), HEIGHT - 8);
  pen.textAlign = "left";
  const kept = document.createElement("canvas");
  [kept.width, kept.height] = [canvas.width, canvas.height];
  kept.getContext("2d").drawImage(canvas, 0, 0);
  return { kept, x };
}

function finish(pen, x, top) {
  for (let i = 0; i < 8; i++) {
    pen.fillStyle = colour(i % 2 ? "paper" : "ink");
    pen.fillRect(x, top - 3 + i * 4, 3, 4);
  }
}

/** What has not happened yet is pale; both runs' tokens stand at the cursor. */
function drawMoment(canvas, width, { kept, x }, found, now) {
  const pen = prepare(canvas, width, HEIGHT);
  pen.save();
  pen.setTransform(1, 0, 0, 1, 0, 0);
  pen.drawImage(kept, 0, 0);
  pen.restore();
  pen.globalAlpha = 0.62;
  pen.fillStyle = colour("card");
  pen.fillRect(x(now), TOP, width - x(now), PITCH + ROW);
  pen.globalAlpha = 1;
  [found.own, found.plain?.passes].forEach((passes, row) => {
    if (passes)
      count(pen, plural(passes[passAt(passes, now)].tokens, "token"), x(now), TOP + row * PITCH + ROW / 2, width);
  });
  pen.fillStyle = colour("accent");
  pen.fillRect(x(now) - 1, TOP - 8, 2, PITCH + ROW + 16);
}

function count(pen, text, x, y, width) {
  const wide = pen.measureText(text).width + 8,
    left = x + 6 + wide > width ? x - wide - 4 : x + 6;
  pen.fillStyle = colour("card");
  pen.fillRect(left, y - 9, wide, 18);
  pen.fillStyle = colour("ink");
  pen.fillText(text, left + 4, y);
}
