/* Statistics of a run: acceptance, tokens per pass, draft lengths, and how often the controller drafted. */

import { UNKNOWN, el, fixed, grouped, micros, percent, plural, replace, times } from "./dom.js";
import { mountPlot } from "./plot.js";

const WINDOW = 24; // drafts per point of the α curve

const SURE = 20; // samples from which on a bar has its full colour
const FEW = 5; // samples below which it is faint

export function mountDials(run) {
  const numbers = el("dl", { class: "numbers" });
  const alpha = el("ol", { class: "bars", "aria-label": "α by position" });
  const depth = mountPlot({
    title: "Drafted and accepted, step by step",
    summary: "",
    x: "step",
    y: "tokens",
    series: [
      { label: "drafted (K)", hue: "drafted", kind: "steps" },
      { label: "accepted", hue: "accepted", kind: "steps" },
    ],
  });
  const learning = mountPlot({
    title: `α over time, the last ${WINDOW} drafts`,
    summary: "",
    x: "step",
    y: "α",
    series: [{ label: "α", hue: "accepted", kind: "line" }],
    range: { y: () => [0, 1] },
  });
  const reasons = el("p", { class: "reasons" });
  const notes = el("div", { class: "drafting" });
  const positions = el(
    "figure",
    { class: "figure" },
    el("p", { class: "title" }, "α by position, given that it was reached"),
    alpha,
    el("figcaption", {}, `A bar with fewer than ${SURE} samples is pale, with fewer than ${FEW} faint.`),
  );
  const element = el(
    "section",
    { class: "dials", "aria-label": "Statistics" },
    el("h2", {}, "Statistics"),
    numbers,
    reasons,
    el("div", { class: "plots" }, positions, depth.element, learning.element),
    notes,
  );

  function draw() {
    const xs = run.steps.map((step) => step.index + 1);
    replace(numbers, figures(run));
    replace(alpha, run.alphaByPosition().slice(0, 16).map(positionBar));
    positions.hidden = !alpha.children.length;
    depth.set(
      [xs, run.steps.map((step) => step.nodes.length), run.steps.map((step) => step.accepted)],
      `${plural(run.counts.drafted, "token")} drafted, ${run.counts.accepted} accepted, in ${plural(run.counts.steps, "step")}.`,
    );
    learning.set(
      [xs, rolling(run.steps)],
      "It rises when a drafter learns and falls where the text is hard to predict.",
    );
    reasons.textContent = reasonCounts(run);
    replace(notes, sources(run), drafting(run));
  }

  function seek(at) {
    depth.move(at + 1);
    learning.move(at + 1);
  }

  return { element, draw, seek, destroy: () => [depth, learning].forEach((plot) => plot.destroy()) };
}

function positionBar({ alpha, reached }, i) {
  const trust = reached < FEW ? "faint" : reached < SURE ? "pale" : "";
  return el(
    "li",
    { class: trust, "data-samples": reached },
    el("b", {}, `+${i + 1}`),
    el("meter", { class: "agreed", min: 0, max: 1, value: alpha, "aria-label": `α at position ${i + 1}` }),
    el("span", { class: "number" }, `${percent(alpha)} of ${reached}`),
  );
}

/** Each figure has its name as data-number, so that tests can compare it with the trace. */
function figures(run) {
  const { counts } = run;
  const entries = [
    ["tau", "τ, tokens per pass", fixed(run.tau()), "the target’s own included"],
    ["alpha", "α, accepted ÷ reached", percent(run.alpha(), 1), `${counts.accepted} of ${counts.reached}`],
    ["speedup", "speedup over plain", times(run.speedup()), "wall clock"],
    ["steps", "passes", String(counts.steps), `${counts.emitted} tokens`],
    ["drafted", "drafted", String(counts.drafted), `mean K ${fixed(run.meanK(), 1)}`],
  ];
  return entries.map(([name, title, value, more]) =>
    el("div", {}, el("dt", {}, title), el("dd", { "data-number": name }, value), el("dd", { class: "more" }, more)),
  );
}

function rolling(steps) {
  const last = [];
  return steps.map((step) => {
    const reached = step.accepted + step.nodes.some((node) => node.fate === "r");
    if (reached) last.push([step.accepted, reached]);
    if (last.length > WINDOW) last.shift();
    const total = last.reduce((sum, each) => sum + each[1], 0);
    return total ? last.reduce((sum, each) => sum + each[0], 0) / total : null;
  });
}

const REASONS = [
  [/nothing to propose/, "the drafter had nothing to propose"],
  [/not used:|break-even/, "a draft was not expected to pay"],
  [/paused/, "drafting was paused because it had cost more than it gained"],
  [/prompts fill/, "the prompt filled the pass"],
  [/switched off/, "speculation was switched off"],
];

/** What the controller decided, in one sentence of counts. */
function reasonCounts(run) {
  const counted = new Map();
  for (const step of run.steps.filter((step) => !step.nodes.length)) {
    const reason = REASONS.find(([pattern]) => pattern.test(step.why))?.[1] ?? `the reason is ${UNKNOWN}`;
    counted.set(reason, (counted.get(reason) ?? 0) + 1);
  }
  const others = [...counted].sort((a, b) => b[1] - a[1]).map(([reason, count]) => `in ${grouped(count)} ${reason}`);
  return `${[`A draft was verified in ${grouped(run.counts.drafts)} of ${plural(run.counts.steps, "step")}`, ...others].join("; ")}.`;
}

function sources(run) {
  const found = run.bySource().slice(0, 12),
    cells = (tag, values) =>
      el(
        "tr",
        {},
        values.map((value) => el(tag, tag === "th" ? { scope: "col" } : {}, value)),
      );
  if (!found.length) return null;
  const rows = found.map((each) =>
    cells("td", [
      each.source || UNKNOWN,
      String(each.drafts),
      String(each.drafted),
      String(each.accepted),
      percent(each.alpha),
    ]),
  );
  return [
    el("h3", {}, "Drafters"),
    el(
      "div",
      { class: "wide", tabindex: "0", role: "group", "aria-label": "Drafters" },
      el(
        "table",
        { class: "sources" },
        el("thead", {}, cells("th", ["drafter", "drafts", "tokens", "accepted", "α"])),
        el("tbody", {}, rows),
      ),
    ),
  ];
}

/** The state of a drafter that learns while it serves. */
function learning(state) {
  if (typeof state !== "object" || state === null) return null;
  const [updates, records] = [state.updates, state.records].map((value) =>
    Number.isSafeInteger(value) ? grouped(value) : UNKNOWN,
  );
  return el(
    "p",
    { "data-number": "learning" },
    `Learning ${String(state.state).slice(0, 40)}: ${updates} updates from ${records} verified tokens so far.`,
  );
}

/** The drafter's own statistics, shown as recorded; only `ahead` has a sentence of its own. */
function drafting(run) {
  const recorded = run.footer?.drafting ?? {},
    learned = learning(run.footer?.learning);
  if (!Object.keys(recorded).length) return learned;
  const ahead = typeof recorded.ahead === "object" && recorded.ahead ? recorded.ahead : null;
  const rest = Object.entries(recorded)
    .filter(([name]) => name !== "ahead")
    .slice(0, 12);
  const number = (value) => (typeof value === "number" && Number.isFinite(value) ? value : null);
  return [
    learned,
    el("h3", {}, "The drafter’s own statistics"),
    ahead
      ? el(
          "p",
          { "data-number": "hits" },
          `Ahead: ${percent(number(ahead.hit_rate))} of outcomes were drafted in advance; ${micros((number(ahead.hidden_seconds) ?? 0) * 1e6)} of drafting hidden behind the target, ${micros((number(ahead.exposed_seconds) ?? 0) * 1e6)} not.`,
        )
      : null,
    rest.length
      ? el(
          "dl",
          { class: "told" },
          rest.map(([name, value]) =>
            el("div", {}, el("dt", {}, name.slice(0, 60)), el("dd", {}, JSON.stringify(value).slice(0, 300))),
          ),
        )
      : null,
  ];
}
