/* The dials: how often the target agrees, how far a pass reaches, how much is drafted and why. */

import { UNKNOWN, el, fixed, grouped, micros, percent, plural, replace, times } from "./dom.js";
import { mountPlot } from "./plot.js";

const WINDOW = 24; // drafts of one point of the learning curve

export function mountDials(run, { compact }) {
  const numbers = el("dl", { class: "numbers" });
  const alpha = mountPlot({
    title: "α by position, given that it was reached",
    words: "",
    x: "position in the draft",
    y: "α",
    series: [{ label: "α", hue: "accepted", kind: "bars" }],
    range: { x: (u) => [0.4, u.data[0].length + 0.6], y: () => [0, 1] },
  });
  const depth = mountPlot({
    title: "Drafted and accepted, step by step",
    words: "",
    x: "step",
    y: "tokens",
    series: [
      { label: "drafted (K)", hue: "drafted", kind: "steps" },
      { label: "accepted", hue: "accepted", kind: "steps" },
    ],
  });
  const learning = mountPlot({
    title: `α over time, the last ${WINDOW} drafts`,
    words: "",
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
    { class: "panel dials", "aria-label": "The dials" },
    el("h3", {}, "The dials"),
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
    const places = run.alphaByPosition(),
      xs = run.steps.map((step) => step.index + 1);
    alpha.element.hidden = !places.length;
    alpha.set(
      [places.map((_, i) => i + 1), places.map((each) => each.alpha)],
      places
        .map((each, i) => `${i + 1}: ${percent(each.alpha)} of ${each.reached}`)
        .slice(0, 8)
        .join(", ") || "Nothing was drafted.",
    );
    depth.set(
      [xs, run.steps.map((step) => step.nodes.length), run.steps.map((step) => step.accepted)],
      `${plural(run.counts.drafted, "token")} drafted, ${run.counts.accepted} accepted, in ${plural(run.counts.steps, "step")}.`,
    );
    learning.set([xs, rolling(run.steps)], "It rises where a drafter learns, and falls where the text turns hard.");
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

/** Every figure carries its name for whoever checks them against the trace. */
function figures(run) {
  const { counts } = run;
  const told = [
    ["tau", "τ, tokens per pass", fixed(run.tau()), "bonus included"],
    ["alpha", "α, accepted ÷ reached", percent(run.alpha(), 1), `${counts.accepted} of ${counts.reached}`],
    ["speedup", "against plain", times(run.speedup()), "clock against clock"],
    ["steps", "passes", String(counts.steps), `${counts.emitted} tokens`],
    ["drafted", "drafted", String(counts.drafted), `K ${fixed(run.meanK(), 1)} on average`],
  ];
  return told.map(([name, title, value, more]) =>
    el("div", {}, el("dt", {}, title), el("dd", { "data-number": name }, value), el("dd", { class: "more" }, more)),
  );
}

function rolling(steps) {
  const last = [];
  return steps.map((step) => {
    const walked = step.accepted + step.nodes.some((node) => node.fate === "r");
    if (walked) last.push([step.accepted, walked]);
    if (last.length > WINDOW) last.shift();
    const reached = last.reduce((sum, each) => sum + each[1], 0);
    return reached ? last.reduce((sum, each) => sum + each[0], 0) / reached : null;
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
    el("h4", {}, "Who drafted"),
    el(
      "div",
      { class: "wide", tabindex: "0", role: "group", "aria-label": "Who drafted" },
      el(
        "table",
        { class: "sources" },
        el("thead", {}, cells("th", ["drafter", "drafts", "tokens", "accepted", "α"])),
        el("tbody", {}, rows),
      ),
    ),
  ];
}

/** A drafter that learns while it serves says how far it is. */
function learning(told) {
  if (typeof told !== "object" || told === null) return null;
  const [updates, records] = [told.updates, told.records].map((value) =>
    Number.isSafeInteger(value) ? grouped(value) : UNKNOWN,
  );
  return el(
    "p",
    { "data-number": "learning" },
    `Learning ${String(told.state).slice(0, 40)}: ${updates} updates from ${records} verified tokens so far.`,
  );
}

/** What a drafter told about its own work. Shown as it was told; `ahead` is known by name. */
function drafting(run) {
  const told = run.footer?.drafting ?? {},
    learnt = learning(run.footer?.learning);
  if (!Object.keys(told).length) return learnt;
  const ahead = typeof told.ahead === "object" && told.ahead ? told.ahead : null;
  const rest = Object.entries(told)
    .filter(([name]) => name !== "ahead")
    .slice(0, 12);
  const number = (value) => (typeof value === "number" && Number.isFinite(value) ? value : null);
  return [
    learnt,
    el("h4", {}, "What the drafter tells"),
    ahead
      ? el(
          "p",
          { "data-number": "hits" },
          `Ahead: ${percent(number(ahead.hit_rate))} of outcomes were prepared for; ${micros((number(ahead.hidden_seconds) ?? 0) * 1e6)} of drafting hidden behind the target, ${micros((number(ahead.exposed_seconds) ?? 0) * 1e6)} not.`,
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
