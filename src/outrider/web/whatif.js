/* What if: the theory of speculative decoding with three sliders, and this run's measured point on its curves.

   α is the probability that a reached drafted token is accepted, K the drafted tokens per pass, c the cost of drafting
   one in plain passes. The theory assumes independent acceptances and a wide pass that costs no more than a narrow one. */

import { UNKNOWN, el, fixed, percent, replace, times } from "./dom.js";
import { mountPlot } from "./plot.js";

const MOST = 16;

/** Tokens of one pass: 1 + α + … + α^K. */
export const expectedTokens = (alpha, k) => (alpha >= 1 ? k + 1 : (1 - alpha ** (k + 1)) / (1 - alpha));

/** Speedup over plain decoding. */
export const factor = (alpha, k, c) => expectedTokens(alpha, k) / (k * c + 1);

/** The α from which K drafted tokens pay; null where even a perfect drafter loses. */
export function breakEven(k, c) {
  if (k * c + 1 > k + 1) return null;
  let low = 0,
    high = 1;
  for (let i = 0; i < 40; i++) {
    const middle = (low + high) / 2;
    if (expectedTokens(middle, k) >= k * c + 1) high = middle;
    else low = middle;
  }
  return high;
}

export function bestK(alpha, c) {
  let best = 0;
  for (let k = 1; k <= 64; k++) if (factor(alpha, k, c) > factor(alpha, best, c) + 1e-12) best = k;
  return best;
}

/** The run's own values; null where not recorded. */
export function measured(run) {
  const { counts } = run;
  const k = counts.steps ? counts.drafted / counts.steps : null;
  return { alpha: run.alpha(), k, c: run.draftCost(), tau: run.tau(), speed: run.speedup(), pass: run.passCost() };
}

export function mountWhatIf(element, run) {
  const own = measured(run);
  const alpha = slider("α", "probability that a reached token is accepted", 0, 0.99, 0.01, own.alpha ?? 0.7, (v) =>
    percent(v),
  );
  const k = slider("K", "drafted tokens per pass", 0, MOST, 1, Math.round(run.meanK() ?? 4), String);
  const c = slider("c", "drafting one token, in plain passes", 0, 1, 0.01, own.c ?? 0.05, (v) => fixed(v));
  const point = { label: "this run", hue: "ink", kind: "points" };
  const chosen = { label: "your K", hue: "accent", kind: "spots" };
  const series = (label) => [{ label, hue: "ink-2", kind: "line" }, chosen, point]; // theory has no actor's colour
  const tokens = mountPlot({
    title: "Expected tokens per pass",
    summary: "",
    x: "K",
    y: "tokens",
    series: series("(1 − α^(K+1)) ÷ (1 − α)"),
  });
  const speed = mountPlot({
    title: "Speedup over plain decoding",
    summary: "",
    x: "K",
    y: "factor",
    series: [...series("theory"), { label: "break-even", hue: "ink-2", kind: "line", dash: [5, 5], width: 1.5 }],
  });
  const even = mountPlot({
    title: "The α from which drafting pays",
    summary: "",
    x: "K",
    y: "α",
    series: series("break-even α"),
    range: { y: () => [0, 1] },
  });
  const advice = el("p", { class: "result", "aria-live": "polite" });
  const reset = el(
    "button",
    { type: "button", onclick: () => ([alpha, k, c].forEach((each) => each.reset()), draw()) },
    "Back to this run",
  );

  function draw() {
    const [a, n, cost] = [alpha.value(), k.value(), c.value()];
    const xs = [...new Set([...Array(MOST + 1).keys(), ...(own.k !== null && own.k <= MOST ? [own.k] : [])])].sort(
      (x, y) => x - y,
    );
    const single = (at, y) => xs.map((x) => (x === at ? y : null));
    const curve = (f) => xs.map((x) => f(x));
    tokens.set(
      [xs, curve((x) => expectedTokens(a, x)), single(n, expectedTokens(a, n)), single(own.k, own.tau)],
      `At K = ${n}: ${fixed(expectedTokens(a, n))} expected. This run: τ = ${fixed(own.tau)} at ${fixed(own.k, 1)} drafted per pass.`,
    );
    speed.set(
      [xs, curve((x) => factor(a, x, cost)), single(n, factor(a, n, cost)), single(own.k, own.speed), curve(() => 1)],
      `At K = ${n}: ${times(factor(a, n, cost))}. This run: ${times(own.speed)}${own.pass === null ? "" : `; its verifying passes took ${times(own.pass)} the time of a plain pass, where the theory assumes 1`}.`,
    );
    even.set(
      [
        xs,
        curve((x) => (x > 0 ? breakEven(x, cost) : null)),
        single(n, n > 0 ? breakEven(n, cost) : null),
        single(own.k, own.alpha),
      ],
      n === 0
        ? "Nothing is drafted."
        : `At K = ${n}: ${breakEven(n, cost) === null ? "never" : percent(breakEven(n, cost), 1)}. This run: α = ${percent(own.alpha, 1)}.`,
    );
    const best = bestK(a, cost);
    replace(
      advice,
      best === 0
        ? "With this drafter it is best to draft nothing."
        : ["Best: ", el("strong", {}, `K = ${best}`), `, ${times(factor(a, best, cost))} the plain speed.`],
    );
  }

  [alpha, k, c].forEach((each) => each.listen(draw));
  replace(
    element,
    el(
      "div",
      { class: "intro" },
      el("h1", {}, "What if?"),
      el("p", {}, "Move the sliders; the dot follows, the ring marks what this run measured."),
    ),
    el(
      "div",
      { class: "panel" },
      el("div", { class: "sliders" }, alpha.element, k.element, c.element),
      el("div", { class: "pager" }, advice, reset),
    ),
    el("div", { class: "panel plots" }, tokens.element, speed.element, even.element),
    el(
      "p",
      { class: "note" },
      `Measured in this run: α ${percent(own.alpha, 1)}, K ${fixed(own.k, 1)} per pass, c ${own.c === null ? UNKNOWN : fixed(own.c, 3)}. The theory assumes independent acceptances; real texts have difficult passages, so it is slightly optimistic.`,
    ),
  );
  draw();
  return { destroy: () => [tokens, speed, even].forEach((plot) => plot.destroy()) };
}

function slider(name, title, min, max, step, start, show) {
  const value = Math.min(max, Math.max(min, start));
  const output = el("output", {}, show(value));
  const input = el("input", { type: "range", min, max, step, value, "aria-label": `${name}: ${title}` });
  const update = () => (
    (output.textContent = show(Number(input.value))),
    input.setAttribute("aria-valuetext", output.textContent)
  );
  update();
  return {
    element: el("label", { class: "slider" }, el("b", {}, name), el("span", {}, title), input, output),
    value: () => Number(input.value),
    reset: () => ((input.value = String(value)), update()),
    listen: (draw) => input.addEventListener("input", () => (update(), draw())),
  };
}
