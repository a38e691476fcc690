/* Statistics of a run: acceptance, tokens per pass, draft lengths, and the controller's reasons. */

import { UNKNOWN, el, fixed, grouped, micros, percent, plural, replace, times } from "./dom.js";
import { mountPlot } from "./plot.js";

const WINDOW = 24; // drafts per point of the α curve

export function mountDials(run, { compact }) {
  const numbers = el("dl", { class: "numbers" });
  const alpha = mountPlot({
    title: "α by position, given that it was reached",
    summary: "",
    x: "position in the draft",
    y: "α",
    series: [{ label: "α", hue: "accepted", kind: "bars" }],
    range: { x: (u) => [0.4, u.data[0].length + 0.6], y: () => [0, 1] },
  });
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
  const reasons = el("div", { class: "reasons" });
  const notes = el("div", { class: "drafting" });
  const plots = compact ? [] : [alpha, depth, learning];
  const element = el(
    "section",
    { class: "panel dials", "aria-label": "Statistics" },
    el("h3", {}, "Statistics"),
    numbers,
    compact
      ? null
      : el(
          "div",
          { class: "plots" },
          plots.map((plot) => plot.element),
        ),
    compact ? null : reasons,
    compact ? null : notes,
  );

  function draw() {
    replace(numbers, figures(run));
    if (compact) return;
    const positions = run.alphaByPosition(),
      xs = run.steps.map((step) => step.index + 1);
    alpha.element.hidden = !positions.length;
    alpha.set(
      [positions.map((_, i) => i + 1), positions.map((each) => each.alpha)],
      positions
        .map((each, i) => `${i + 1}: ${percent(each.alpha)} of ${each.reached}`)
        .slice(0, 8)
        .join(", ") || "Nothing was drafted.",
    );
    depth.set(
      [xs, run.steps.map((step) => step.nodes.length), run.steps.map((step) => step.accepted)],
      `${plural(run.counts.drafted, "token")} drafted, ${run.counts.accepted} accepted, in ${plural(run.counts.steps, "step")}.`,
    );
    learning.set([xs, rolling(run.steps)], "It rises when a drafter learns and falls where the text is hard to predict.");
    replace(notes, sources(run), drafting(run));
  }

  function seek(at) {
    if (compact) return;
    depth.move(at + 1);
    learning.move(at + 1);
    replace(reasons, el("h4", {}, "The controller’s reasons"), reasonList(run, at));
  }

  return { element, draw, seek, destroy: () => plots.forEach((plot) => plot.destroy()) };
}

/** Each figure has its name as data-number, so that tests can compare it with the trace. */
function figures(run) {
  const { counts } = run;
  const entries = [
    ["tau", "τ, tokens per pass", fixed(run.tau()), "bonus included"],
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

const kind = (why) => why.replace(/\d+([.,]\d+)*/g, "…") || UNKNOWN;

function reasonList(run, at) {
  if (run.reasonsOf !== run.version) {
    run.reasonsOf = run.version;
    run.reasons = new Map();
    for (const step of run.steps) run.reasons.set(kind(step.why), (run.reasons.get(kind(step.why)) ?? 0) + 1);
  }
  const now = run.steps[at],
    most = [...run.reasons].sort((a, b) => b[1] - a[1]).slice(0, 5);
  return [
    el("p", {}, `Step ${at + 1}, budget ${now.budget ?? UNKNOWN}: `, el("q", {}, now.why || UNKNOWN)),
    el(
      "ul",
      {},
      most.map(([why, count]) =>
        el("li", { class: why === kind(now.why) ? "marked" : "" }, el("b", {}, `${count}×`), ` ${why}`),
      ),
    ),
  ];
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
    el("h4", {}, "Drafters"),
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
    el("h4", {}, "The drafter’s own statistics"),
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
