/* One turn of the chat: the message, the answer by origin, and beside it the race with its numbers and verdict. */

import { el, fixed, micros, percent, plural, replace, times } from "./dom.js";
import { same, speedup } from "./live-race.js";
import { mountRace } from "./race.js";
import { stepElement } from "./ribbon.js";

const NONE = "–"; // not measured yet
const COLUMNS = [
  ["tokens", "tokens", (runner) => String(runner.ids.length)],
  ["clock", "clock", (runner) => (runner.clock === null ? NONE : micros(runner.clock))],
  ["speed", "tokens/s", (runner) => (runner.speed === null ? NONE : runner.speed.toFixed(0))],
  ["alpha", "α", (runner) => (runner.alpha === null ? NONE : percent(runner.alpha))],
  ["tau", "τ", (runner) => (runner.tau === null ? NONE : fixed(runner.tau))],
];

export function makeTurn({ prompt }, runners, { open }) {
  const [own, plain] = runners;
  const said = el("p", { class: "said", "aria-label": "Answer" });
  const found = mountRace(() => raceOf(own, plain));
  const result = el("div", { class: "verdict" });
  const acts = el(
    "p",
    { class: "acts", hidden: true },
    el("button", { type: "button", onclick: () => open(own, prompt) }, "Open in Run"),
    el("button", { type: "button", onclick: () => download(own) }, "Download the trace"),
  );
  const rows = runners.map(clockRow);
  const head = el(
    "tr",
    {},
    el("td"),
    COLUMNS.map(([, title]) => el("th", { scope: "col" }, title)),
  );
  const element = el(
    "article",
    { class: "turn" },
    el("p", { class: "asked" }, prompt),
    el(
      "div",
      { class: "panel replied" },
      said,
      el("p", { class: "note" }, "Underlined: accepted from the draft. The rest is the target’s own."),
    ),
    el(
      "aside",
      { class: "panel beside", "aria-label": "The race" },
      result,
      found.element,
      el(
        "table",
        { class: "clocks" },
        el("thead", {}, head),
        el(
          "tbody",
          {},
          rows.map((row) => row.element),
        ),
      ),
      el(
        "p",
        { class: "note" },
        el("dfn", {}, "α"),
        " is the share of reached drafted tokens that were accepted, ",
        el("dfn", {}, "τ"),
        " the tokens per pass.",
      ),
      acts,
    ),
  );
  let steps = 0;

  function update() {
    rows.forEach((row) => row.update());
    const fresh = own.run.steps.slice(steps);
    said.append(...fresh.map((step) => stepElement(own.run, step, `step tint${step.index % 2}`)));
    steps += fresh.length;
    if (own.state === "done" && said.textContent !== own.text) replace(said, own.text); // a stop string was cut off
    found.seek(null);
    found.draw();
    acts.hidden = own.state !== "done";
    element.dataset.state = plain.state === "waiting" ? own.state : plain.state;
    replace(result, verdict(own, plain));
  }

  update();
  return { element, update };
}

/** Both runs on one clock while they run: the plain one has its own trace. */
function raceOf(own, plain) {
  const [mine, other] = [own.run.race(), plain.run.race()];
  return mine && { ...mine, plain: other && { passes: other.own, end: other.ownEnd }, racing: plain.state !== "done" };
}

function clockRow(runner) {
  const cells = COLUMNS.map(([name]) => el("td", { "data-number": name }));
  const element = el(
    "tr",
    { "data-runner": runner.name },
    el(
      "th",
      { scope: "row" },
      el("i", { class: `swatch ${runner.plain ? "plain" : "verify"}` }),
      runner.plain ? "plain" : runner.name,
    ),
    cells,
  );
  const update = () => {
    element.dataset.state = runner.state;
    COLUMNS.forEach(([, , read], i) => (cells[i].textContent = read(runner)));
  };
  return { element, update };
}

/* ---------------------------------------------------------------- verdict */

const WAITING = {
  waiting: "Waiting …",
  running: "Answering …",
  stopped: "Stopped before the answer was complete.",
  failed: "The request failed.",
};
const RACING = {
  waiting: "Answered. Now plain decoding of the same request …",
  running: "Answered. Now plain decoding of the same request …",
  stopped: "Answered. The plain run was stopped, so there is no comparison.",
  failed: "Answered. The plain run failed, so there is no comparison.",
};

function verdict(own, plain) {
  if (own.state !== "done") return el("p", { class: "note" }, WAITING[own.state]);
  if (plain.state !== "done") return el("p", { class: "note" }, RACING[plain.state]);
  const { identical, upTo } = same(own, plain),
    rate = speedup(own, plain);
  if (!identical)
    return el(
      "p",
      { class: "differs", "data-same": "false" },
      el("strong", {}, "✗ The texts differ "),
      `from token ${upTo + 1} on. ${explanation(own)}`,
    );
  return el(
    "p",
    { class: "result", "data-same": "true" },
    rate === null ? null : el("strong", { "data-number": "speedup" }, times(rate)),
    rate === null ? "" : ` the plain speed${rate < 1 ? ": drafting cost more than it saved" : ""}. `,
    `✓ The same text, all ${plural(upTo, "token")}.`,
  );
}

function explanation(runner) {
  const rule = runner.run.header?.rule;
  return rule && rule !== "match"
    ? `This server runs the rule “${String(rule).slice(0, 20)}”, which preserves the distribution, not the exact text.`
    : "This is a bug: please run `outrider verify` and report its output.";
}

export function outcome(own, plain) {
  const rate = speedup(own, plain);
  return `${rate === null ? "Done" : `${times(rate)} the plain speed`}, ${same(own, plain).identical ? "the same text" : "a different text"}.`;
}

function download(runner) {
  const url = URL.createObjectURL(new Blob([runner.jsonl], { type: "application/x-ndjson" }));
  el("a", { href: url, download: `outrider-${runner.name.replace(/\W+/g, "-")}.jsonl` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
