/* Six stations over a real run, one idea each. Every token, probability and time is from the trace. */

import {
  UNKNOWN,
  chance,
  el,
  fixed,
  legend,
  micros,
  percent,
  plural,
  prefersReducedMotion,
  replace,
  times,
  visible,
} from "./dom.js";
import { exampleSteps } from "./highlights.js";

const STATIONS = [
  {
    name: "Baseline",
    title: "One pass, one token",
    idea: "A language model reads all of the text so far and emits one token. For the next token it runs again, from the first layer to the last. However easy the token is, it costs one whole pass.",
    rule: "One more token: run the whole model once more.",
    trap: "“One token is little work.” It is little arithmetic, but all the weights are read for it: the pass mostly waits for memory.",
    figure: baseline,
  },
  {
    name: "Draft",
    title: "A cheap drafter guesses ahead",
    idea: "A drafter (a small network, or a lookup in the text so far) proposes the next few tokens. q is the probability that it gives each one. Its proposals are only candidates: the target decides.",
    rule: "Draft only as far as the tokens are still likely to be reached.",
    trap: "A drafter that is right but slow: the time that it saves is spent on drafting.",
    figure: (run, steps) => stepFigure(run, steps.accept, "draft"),
  },
  {
    name: "Verify",
    title: "The target checks them all at once",
    idea: "How can the target emit more than one token per pass? A pass over several tokens gives a prediction after each of them. Usually only the last prediction is useful, because the following tokens are not known yet. The draft is a guess of them: appended to the text, it lets one pass check every position. p is the target’s probability of each drafted token.",
    rule: "One pass over the whole draft; at every position the target makes its own choice.",
    trap: "“Extra positions are free.” They are cheap while the machine waits for memory, and cost full price when it is busy.",
    figure: (run, steps) => stepFigure(run, steps.accept, "verify"),
  },
  {
    name: "Accept",
    title: "The agreeing prefix is kept",
    idea: "Where the drafted token equals the target’s choice, the next position was computed on the right text, so the choice there counts too. The agreeing prefix is emitted, and the target’s next choice is added as a bonus.",
    rule: "Keep drafted tokens while each equals the target’s own choice; then add the target’s next one.",
    trap: "Counting a match after a miss: the target computed it from a text that was never emitted.",
    figure: (run, steps) => stepFigure(run, steps.accept, "accept"),
  },
  {
    name: "Reject",
    title: "The first miss ends it",
    idea: "Where the draft is wrong, the target’s own choice is emitted instead, and everything drafted after it is discarded. The text is the same as without any draft. A bad draft costs time, never correctness.",
    rule: "At the first miss: emit the target’s token, discard the tail, draft again.",
    trap: "Reading rejections as errors. No wrong token was ever in the text; only a little work was wasted.",
    figure: (run, steps) => stepFigure(run, steps.reject, "reject"),
  },
  {
    name: "Speedup",
    title: "The same text in fewer passes",
    idea: "The gain is the passes that did not have to run. How many depends on α, how often the target agrees, and on K, how many tokens are drafted. The target is never skipped: it still chooses every token.",
    rule: "Speculate while the expected tokens per pass outweigh the cost of drafting and of the wider pass.",
    trap: "Looking at α alone. A drafter that is always right gains nothing if it is as slow as the target, or if K is 0.",
    figure: speedup,
  },
];

export function mountExplain(element, run, fallback) {
  const [shown, steps] = exampleSteps(run) ? [run, exampleSteps(run)] : [fallback, exampleSteps(fallback)];
  let at = 0;
  const dots = STATIONS.map((station, i) =>
    el(
      "button",
      { type: "button", class: "dot", onclick: (event) => press(event, i) },
      el("span", { "aria-hidden": "true" }, String(i + 1)),
      el("span", { class: "name" }, station.name),
    ),
  );
  const back = el("button", { type: "button", onclick: (event) => press(event, at - 1) }, "← Back");
  const next = el("button", {
    type: "button",
    class: "primary",
    onclick: (event) => (at === STATIONS.length - 1 ? (location.hash = "#run") : press(event, at + 1)),
  });
  const card = el("article", { class: "station", "aria-live": "polite", tabindex: "-1" });
  const substituted =
    shown === run
      ? null
      : el(
          "p",
          { class: "note" },
          "The open trace has no step with both accepted and rejected drafts, so the stations show the bundled run.",
        );

  function go(i) {
    at = Math.max(0, Math.min(STATIONS.length - 1, i));
    const station = STATIONS[at];
    dots.forEach((dot, j) =>
      j === at ? dot.setAttribute("aria-current", "step") : dot.removeAttribute("aria-current"),
    );
    back.disabled = at === 0;
    next.textContent = at === STATIONS.length - 1 ? "See the whole run →" : `${STATIONS[at + 1].name} →`;
    card.classList.toggle("arrive", !prefersReducedMotion());
    card.dataset.station = String(at + 1);
    replace(
      card,
      el("p", { class: "count" }, `Station ${at + 1} of ${STATIONS.length} · ${station.name}`),
      el("h2", {}, station.title),
      el("p", { class: "idea" }, station.idea),
      steps ? station.figure(shown, steps) : el("p", { class: "note" }, "This run has no drafts to show."),
      el(
        "dl",
        { class: "rules" },
        el("div", { class: "rule" }, el("dt", {}, "Decision rule"), el("dd", {}, station.rule)),
        el("div", { class: "trap" }, el("dt", {}, "Failure trap"), el("dd", {}, station.trap)),
      ),
    );
  }

  /** After a mouse click the space bar should advance, not press the same button again. */
  function press(event, i) {
    go(i);
    if (event.detail > 0) card.focus({ preventScroll: true });
  }

  function key(event) {
    const field = event.target.closest?.("input, select, textarea, summary, a");
    const pressed = event.key === " " && event.target.closest?.("button");
    if (event.altKey || event.ctrlKey || event.metaKey || field || pressed) return false;
    if (event.key === " " || event.key === "ArrowRight" || event.key === "PageDown") go(at + (event.shiftKey ? -1 : 1));
    else if (event.key === "ArrowLeft" || event.key === "PageUp") go(at - 1);
    else if (event.key === "Home" || event.key === "End") go(event.key === "Home" ? 0 : STATIONS.length - 1);
    else return false;
    event.preventDefault();
    return true;
  }

  replace(
    element,
    el(
      "div",
      { class: "intro" },
      el("h1", {}, "Watch a model emit several tokens per pass"),
      el(
        "p",
        {},
        "This is a real run, recorded step by step: nothing here is simulated. Press ",
        el("kbd", {}, "space"),
        " or the arrow keys.",
      ),
    ),
    substituted,
    el("nav", { class: "dots", "aria-label": "Stations" }, dots),
    card,
    el("div", { class: "pager" }, back, next),
  );
  go(0);
  return { key, go };
}

/* ---------------------------------------------------------------- figures */

function contextOf(run, step) {
  const text = run.steps
    .slice(0, step.index)
    .map((each) => run.textOf(each).join(""))
    .join("");
  const tail = text.slice(-240).split("\n").slice(-3).join("\n").replace(/^\n+/, "");
  return el(
    "pre",
    { class: "context", tabindex: "0", "aria-label": "The text before this step" },
    tail.length < text.length ? "… " : "",
    tail,
    el("span", { class: "caret", "aria-hidden": "true" }),
  );
}

function baseline(run) {
  const plain = run.race()?.plain;
  const tokens = run.steps.flatMap((step) => run.textOf(step)).slice(1, 8);
  const cells = tokens.map((text, i) =>
    el(
      "li",
      {},
      el("span", { class: "passbar" }, plain ? micros(plain.passes[i + 1]?.lasted ?? null) : "one pass"),
      el("span", { class: "arrow", "aria-hidden": "true" }, "↓"),
      el("code", { class: "chip bonus" }, visible(text)),
    ),
  );
  const summary = plain
    ? `The plain run of this prompt: ${plural(plain.passes.length, "token")}, ${plural(plain.passes.length, "pass", "passes")}, median ${micros(plain.pass)} each.`
    : `The plain run is ${UNKNOWN} in this trace.`;
  return el(
    "figure",
    { class: "strip" },
    el("ol", { class: "passes", tabindex: "0", "aria-label": "Passes of the plain run" }, cells),
    el("figcaption", {}, summary),
  );
}

/** One step as a table: a column for each position, rows for draft, target and emitted. */
function stepFigure(run, step, stage) {
  const width = step.nodes.length,
    judged = stage !== "draft",
    settled = stage === "accept" || stage === "reject";
  const columns = judged ? Math.max(width, step.emitted.length) + (step.emitted.length > width ? 0 : 1) : width;
  const positions = [...Array(columns).keys()];
  const rows = [
    el(
      "tr",
      {},
      el("th", { scope: "row" }, "draft"),
      positions.map((i) => draftCell(run, step, i, settled)),
    ),
  ];
  if (judged)
    rows.push(
      el(
        "tr",
        {},
        el("th", { scope: "row" }, "target"),
        positions.map((i) => targetCell(run, step, i, settled)),
      ),
    );
  if (settled)
    rows.push(
      el(
        "tr",
        { class: "emitted" },
        el("th", { scope: "row" }, "emitted"),
        positions.map((i) => emittedCell(run, step, i)),
      ),
    );
  const head = el(
    "tr",
    {},
    el("th", { scope: "col" }, "position"),
    positions.map((i) => el("th", { scope: "col" }, i < width ? `+${i + 1}` : "next")),
  );
  const pass = judged
    ? el("div", { class: "onepass" }, `one pass of the target · ${micros(step.us.verify?.[1])}`)
    : el("div", { class: "onepass cheap" }, `the drafter ${step.source} · ${micros(step.us.draft?.[1])}`);
  return el(
    "figure",
    { class: "strip" },
    contextOf(run, step),
    el(
      "div",
      { class: "wide", tabindex: "0", role: "group", "aria-label": "The step, position by position" },
      el(
        "div",
        { class: "fit" },
        pass,
        el("table", { class: "positions" }, el("thead", {}, head), el("tbody", {}, rows)),
      ),
    ),
    settled ? legend("a", "b", "r", "u") : null,
    el("figcaption", {}, caption(run, step, stage)),
  );
}

function draftCell(run, step, i, settled) {
  const node = step.nodes[i];
  if (!node) return el("td", {}, "");
  const name = !settled ? "drafted" : { a: "accepted", r: "rejected", u: "unreached", p: "pruned" }[node.fate];
  return el(
    "td",
    {},
    el("code", { class: `chip ${name}` }, visible(run.piece(node.token))),
    el("small", {}, `q ${chance(node.q)}`),
  );
}

function targetCell(run, step, i, settled) {
  const node = step.nodes[i],
    emitted = step.emitted[i],
    reached = i < step.emitted.length;
  if (settled && !reached) return el("td", { class: "empty" }, "–");
  const p = settled || !node ? step.chose?.[i]?.p : node.p;
  const shown = reached
    ? el("code", { class: "chip own" }, visible(run.piece(emitted)))
    : el("span", { class: "empty" }, node ? "…" : "");
  return el(
    "td",
    {},
    shown,
    el("small", {}, node && !settled ? `p ${chance(node.p)}` : reached ? `p ${chance(p)}` : ""),
  );
}

function emittedCell(run, step, i) {
  if (i >= step.emitted.length) return el("td", {}, "");
  return el(
    "td",
    {},
    el("code", { class: `chip ${i < step.accepted ? "accepted" : "bonus"}` }, visible(run.piece(step.emitted[i]))),
  );
}

function caption(run, step, stage) {
  const n = step.index + 1;
  if (stage === "draft")
    return `Step ${n} of this run: ${plural(step.nodes.length, "token")} drafted by ${step.source || "an unnamed drafter"}, not verified yet.`;
  if (stage === "verify")
    return `The same step: ${plural(step.nodes.length + 1, "prediction")} from one pass, one after the text and one after each drafted token. p is the target’s probability of the drafted token.`;
  if (stage === "accept")
    return `The same step: ${step.accepted} accepted and ${step.emitted.length - step.accepted} bonus: ${plural(step.emitted.length, "token")} from one pass.`;
  const miss = step.nodes.find((node) => node.fate === "r"),
    chip = (id, name) => el("code", { class: `chip ${name}` }, visible(run.piece(id)));
  return [
    `Step ${n}: the drafter proposed `,
    chip(miss.token, "rejected"),
    ", the target chose ",
    chip(step.emitted[miss.depth], "bonus"),
    `. ${plural(step.emitted.length, "token")} emitted by this pass, ${plural(step.nodes.length - step.accepted, "drafted token")} discarded.`,
  ];
}

function speedup(run) {
  const { counts } = run,
    speed = run.speedup(),
    race = run.race();
  const most = Math.max(counts.steps, counts.emitted);
  const row = (name, passes, hue, after) =>
    el(
      "div",
      { class: "passrow" },
      el("span", {}, name),
      el("meter", { class: hue, min: 0, max: most, value: passes, "aria-label": `${name}: ${passes} passes` }),
      el("b", {}, after),
    );
  const clock = race?.plain
    ? `Wall clock after the prompt: ${micros(race.plain.end)} plain, ${micros(race.ownEnd)} here: ${times(speed)}${speed < 1 ? ". Drafting cost more than it saved" : ""}.`
    : `The plain run’s clock is ${UNKNOWN}.`;
  return el(
    "figure",
    { class: "strip" },
    row("plain", counts.emitted, "plain", plural(counts.emitted, "pass", "passes")),
    row("Outrider", counts.steps, "mine", plural(counts.steps, "pass", "passes")),
    el(
      "figcaption",
      {},
      `${plural(counts.emitted, "token")}${race?.plain?.same ? ", the same in both" : ""}. τ = ${fixed(run.tau())} tokens per pass; α = ${percent(run.alpha())} of the reached drafted tokens were accepted. ${clock}`,
    ),
  );
}
