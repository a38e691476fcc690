/* What if: the theory of speculative decoding with three sliders, and this run's measured point on its curves.

   α is the chance that a drafted token which is reached is accepted, K how many are drafted, c what drafting one costs in
   plain passes. The theory takes chances to be independent and a wide pass to cost no more than a narrow one. */

import { UNKNOWN, el, fixed, percent, replace, times } from "./dom.js";
import { mountPlot } from "./plot.js";

const MOST = 16;

/** Tokens of one pass: 1 + α + … + α^K. */
export const expectedTokens = (alpha, k) => (alpha >= 1 ? k + 1 : (1 - alpha ** (k + 1)) / (1 - alpha));

/** Times as fast as plain decoding. */
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

/** What the run itself says, or null where it does not. */
export function measured(run) {
  const { counts } = run;
  const k = counts.steps ? counts.drafted / counts.steps : null;
  return { alpha: run.alpha(), k, c: run.draftCost(), tau: run.tau(), speed: run.speedup(), pass: run.passCost() };
}

export function mountWhatIf(element, run) {
  const own = measured(run);
  const alpha = slider("α", "chance that a reached token is accepted", 0, 0.99, 0.01, own.alpha ?? 0.7, (v) =>
    percent(v),
  );
  const k = slider("K", "drafted tokens per pass", 0, MOST, 1, Math.round(run.meanK() ?? 4), String);
  const c = slider("c", "drafting one token, in plain passes", 0, 1, 0.01, own.c ?? 0.05, (v) => fixed(v));
  const point = { label: "this run", hue: "accent", kind: "points" };
  const chosen = { label: "your K", hue: "rejected", kind: "spots" };
  const series = (label) => [{ label, hue: "verify", kind: "line" }, chosen, point];
  const tokens = mountPlot({
    title: "Expected tokens per pass",
    words: "",
    x: "K",
    y: "tokens",
    series: series("(1 − α^(K+1)) ÷ (1 − α)"),
  });
  const speed = mountPlot({
    title: "Times as fast as plain decoding",
    words: "",
    x: "K",
    y: "factor",
    series: [...series("theory"), { label: "break-even", hue: "ink-2", kind: "line", dash: [5, 5], width: 1.5 }],
  });
  const even = mountPlot({
    title: "The α from which drafting pays",
    words: "",
    x: "K",
    y: "α",
    series: series("break-even α"),
    range: { y: () => [0, 1] },
  });
  const said = el("p", { class: "result", "aria-live": "polite" });
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
    const lone = (at, y) => xs.map((x) => (x === at ? y : null));
    const curve = (f) => xs.map((x) => f(x));
    tokens.set(
      [xs, curve((x) => expectedTokens(a, x)), lone(n, expectedTokens(a, n)), lone(own.k, own.tau)],
      `At K = ${n}: ${fixed(expectedTokens(a, n))} expected. This run: τ = ${fixed(own.tau)} at ${fixed(own.k, 1)} drafted per pass.`,
    );
    speed.set(
      [xs, curve((x) => factor(a, x, cost)), lone(n, factor(a, n, cost)), lone(own.k, own.speed), curve(() => 1)],
      `At K = ${n}: ${times(factor(a, n, cost))}. This run: ${times(own.speed)}${own.pass === null ? "" : `; its passes over drafts took ${times(own.pass)} a plain pass, which the theory takes to be 1`}.`,
    );
    even.set(
      [
        xs,
        curve((x) => (x > 0 ? breakEven(x, cost) : null)),
        lone(n, n > 0 ? breakEven(n, cost) : null),
        lone(own.k, own.alpha),
      ],
      n === 0
        ? "Nothing drafted, nothing to pay."
        : `At K = ${n}: ${breakEven(n, cost) === null ? "never" : percent(breakEven(n, cost), 1)}. This run: α = ${percent(own.alpha, 1)}.`,
    );
    const best = bestK(a, cost);
    replace(
      said,
      best === 0
        ? "With such a drafter it is best to draft nothing."
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
      el("div", { class: "pager" }, said, reset),
    ),
    el("div", { class: "panel plots" }, tokens.element, speed.element, even.element),
    el(
      "p",
      { class: "note" },
      `Measured in this run: α ${percent(own.alpha, 1)}, K ${fixed(own.k, 1)} per pass, c ${own.c === null ? UNKNOWN : fixed(own.c, 3)}. The theory takes acceptance to be independent from token to token; real texts have hard stretches, so it is a little too kind.`,
    ),
  );
  draw();
  return { destroy: () => [tokens, speed, even].forEach((plot) => plot.destroy()) };
}

function slider(name, words, min, max, step, start, show) {
  const value = Math.min(max, Math.max(min, start));
  const output = el("output", {}, show(value));
  const input = el("input", { type: "range", min, max, step, value, "aria-label": `${name}: ${words}` });
  const tell = () => (
    (output.textContent = show(Number(input.value))),
    input.setAttribute("aria-valuetext", output.textContent)
  );
  tell();
  return {
    element: el("label", { class: "slider" }, el("b", {}, name), el("span", {}, words), input, output),
    value: () => Number(input.value),
    reset: () => ((input.value = String(value)), tell()),
    listen: (draw) => input.addEventListener("input", () => (tell(), draw())),
  };
}
