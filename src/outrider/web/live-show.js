/* Draws a race: a card for each runner, the comparison of the texts, a table of all races so far. */

import { el, fixed, micros, percent, plural, replace, times } from "./dom.js";
import { same, speedup } from "./live-race.js";

const STATES = {
  waiting: "waiting",
  running: "running …",
  done: "done",
  stopped: "stopped",
  failed: "failed",
};
const NONE = "–"; // not measured yet

export function makeCard(runner, tokens) {
  const state = el("span", { class: "state" });
  const cells = Object.fromEntries(
    ["clock", "tokens", "speed", "alpha", "tau"].map((name) => [name, el("dd", { "data-number": name }, NONE)]),
  );
  const bar = el("progress", { max: tokens, value: 0, "aria-label": `Tokens of ${runner.name}` });
  const text = el("pre", { class: "said", tabindex: "0", "aria-label": `Text of ${runner.name}` });
  const row = (title, name) => el("div", {}, el("dt", {}, title), cells[name]);
  const element = el(
    "article",
    {
      class: `panel runner${runner.plain ? " plain" : ""}`,
      "data-runner": runner.name,
      "data-state": "waiting",
      "aria-label": runner.name,
    },
    el("h2", {}, runner.name, " ", state),
    el(
      "dl",
      { class: "numbers" },
      row("clock", "clock"),
      row("tokens", "tokens"),
      row("tokens/s", "speed"),
      row("α", "alpha"),
      row("τ", "tau"),
    ),
    bar,
    text,
  );

  function show(now) {
    element.dataset.state = now.state;
    state.textContent = STATES[now.state];
  }

  function update(now) {
    show(now);
    cells.clock.textContent = now.clock === null ? NONE : micros(now.clock);
    cells.tokens.textContent = String(now.ids.length);
    cells.speed.textContent = now.speed === null ? NONE : now.speed.toFixed(0);
    cells.alpha.textContent = now.alpha === null ? NONE : percent(now.alpha);
    cells.tau.textContent = now.tau === null ? NONE : fixed(now.tau);
    bar.value = now.state === "done" ? bar.max : now.ids.length;
    if (text.textContent.length !== now.text.length) {
      text.textContent = now.text;
      text.scrollTop = text.scrollHeight;
    }
  }

  show(runner);
  return { element, state: show, update };
}

/** Whether the texts are the same, and the speedup. */
export function verdict(runner, plain) {
  const { identical, upTo } = same(runner, plain),
    rate = speedup(runner, plain);
  const badge = identical
    ? el(
        "p",
        { class: "badge same", "data-same": "true" },
        el("strong", {}, "✓ The same text. "),
        `All ${plural(upTo, "token")} of ${runner.name} equal those of plain decoding.`,
      )
    : el(
        "p",
        { class: "badge differs", "data-same": "false" },
        el("strong", {}, "✗ The texts differ "),
        `from token ${upTo + 1} on. ${explanation(runner)}`,
      );
  const result =
    rate === null
      ? null
      : el(
          "p",
          { class: "result" },
          el("strong", { "data-number": "speedup" }, times(rate)),
          ` ${sentence(runner, plain, rate)}`,
        );
  return el(
    "section",
    { class: "verdict", "data-verdict": runner.name, "aria-label": `Result of ${runner.name}` },
    result,
    badge,
  );
}

function sentence(runner, plain, rate) {
  const lost = rate < 1 ? " Drafting cost more than it saved." : "";
  return `the plain speed with ${runner.name}: ${micros(runner.clock)} against ${micros(plain.clock)} after the prompt’s pass, both measured by the server.${lost}`;
}

function explanation(runner) {
  const rule = runner.run.header?.rule;
  return rule && rule !== "match"
    ? `This server runs the rule “${String(rule).slice(0, 20)}”, which preserves the distribution, not the exact text.`
    : "This is a bug: please run `outrider verify` and report its output.";
}

export function outcome(runner, plain) {
  const rate = speedup(runner, plain),
    { identical } = same(runner, plain);
  return `${runner.name}: ${rate === null ? "done" : `${times(rate)} plain speed`}, ${identical ? "the same text" : "a different text"}.`;
}

export function makeScores() {
  const heads = ["Prompt", "Drafter", "Temperature", "Tokens", "α", "τ", "Clock", "Plain clock", "Speed", "Text"];
  const body = el("tbody");
  const table = el(
    "table",
    {},
    el("caption", {}, "Races so far"),
    el(
      "thead",
      {},
      el(
        "tr",
        {},
        heads.map((head) => el("th", { scope: "col" }, head)),
      ),
    ),
    body,
  );
  const element = el(
    "div",
    { class: "panel scores", tabindex: "0", role: "region", "aria-label": "Races so far", hidden: true },
    table,
  );

  function add(title, runner, plain) {
    const cells = [
      runner.name,
      runner.run.temperature,
      runner.ids.length,
      percent(runner.alpha),
      fixed(runner.tau),
      micros(runner.clock),
      micros(plain.clock),
      times(speedup(runner, plain)),
      same(runner, plain).identical ? "✓ the same" : "✗ differs",
    ];
    body.append(
      el(
        "tr",
        {},
        el("th", { scope: "row" }, title),
        cells.map((cell) => el("td", {}, String(cell))),
      ),
    );
    element.hidden = false;
  }

  return { element, add, clear: () => replace(body) };
}
