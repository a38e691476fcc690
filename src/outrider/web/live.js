/* The Live view: ask this server, watch the answer come, and race it against plain decoding of the same request.

   mountLive(section, app)      app.open(run, title) shows a run in the other views

   What is shown is what the traces say that arrive with the answers; the page estimates nothing. While a race is on it
   draws the run's steps seldom (a twentieth of its time at most), because on one machine the browser and the model share
   the cores. */

import { el, replace } from "./dom.js";
import { Refusal, drafters } from "./live-ask.js";
import { makeForm } from "./live-form.js";
import { Runner, race, request } from "./live-race.js";
import { makeCard, makeScores, outcome, verdict } from "./live-show.js";
import { mountRun } from "./view.js";

const DRAW = 250; // milliseconds between two drawings of a run that grows, at least
const IDLE = 20; // times as long as it took, at least

export function mountLive(section, app) {
  const keyed = document.querySelector('meta[name="outrider-key"]')?.content === "1";
  const form = makeForm({ keyed, start, stop, compare, connect });
  const status = el("p", { class: "note", role: "status", "aria-live": "polite" });
  const problem = el("p", { class: "live-problem", role: "alert", hidden: true });
  const cards = el("div", { class: "runners" });
  const verdicts = el("div", { class: "verdicts" });
  const looking = el("div", { class: "looking", role: "group", "aria-label": "Which run is shown below" });
  const heading = el("h2", {});
  const place = el("div", { class: "live-run" });
  const scores = makeScores();
  let runners = [],
    shown = null,
    pinned = false,
    stopper = null;

  style();
  replace(section, intro(), form.element, status, problem, cards, verdicts, scores.element, looking, heading, place);
  if (!keyed) connect();

  /* ------------------------------------------------------------ who is there */

  async function connect() {
    try {
      form.offer(await drafters(form.key));
      say("");
    } catch (error) {
      complain(error);
    }
  }

  /* ------------------------------------------------------------ a race */

  async function start(title = "your prompt") {
    if (stopper || !form.valid()) return;
    say("");
    if (!form.connected) await connect();
    if (!form.connected) return;
    stopper = new AbortController();
    form.running(true);
    try {
      await one(form.settings(), title);
    } catch (error) {
      complain(error);
    } finally {
      stopper = null;
      form.running(false);
      if (shown) look(shown.runner); // now with everything
      draw(true);
    }
  }

  /** Two prompts, each raced against plain decoding; the scores stand side by side. */
  async function compare(presets) {
    for (const { title, prompt } of presets) {
      form.fill(prompt);
      await start(title);
      if (!runners.length || runners.some((runner) => runner.state !== "done")) return;
    }
  }

  async function one(settings, title) {
    begin([...settings.drafters.map((name) => new Runner(name)), new Runner("plain decoding", true)], settings.tokens);
    const changed = (runner) => {
      runner.card.state(runner);
      if (runner.state === "running" && !runner.told) tell(`${runner.name} is running.`);
      runner.told = runner.state === "running";
      if (!pinned && !runner.plain && runner.state === "running" && shown.runner !== runner) look(runner);
      draw();
    };
    await race(runners, request(settings), { key: form.key, signal: stopper.signal, changed });
    const plain = runners.at(-1),
      drafted = runners.filter((runner) => !runner.plain);
    replace(
      verdicts,
      drafted.map((runner) => verdict(runner, plain)),
    );
    for (const runner of drafted) scores.add(title, runner, plain);
    if (!pinned) shown.runner = drafted[0];
    tell(drafted.map((runner) => outcome(runner, plain)).join(" "));
  }

  function begin(fresh, tokens) {
    [runners, pinned] = [fresh, false];
    for (const runner of runners) runner.card = makeCard(runner, tokens);
    replace(
      cards,
      runners.map((runner) => runner.card.element),
    );
    replace(verdicts);
    look(runners[0]);
  }

  function stop() {
    if (!stopper) return;
    stopper.abort();
    tell("Stopped: the server has been told, and its slots are free.");
  }

  /* ------------------------------------------------------------ the run below */

  function look(runner) {
    shown?.view?.destroy();
    shown = { runner, view: null };
    replace(place, el("p", { class: "note" }, "Waiting for the first step …"));
    showRun();
    const button = (each) =>
      el(
        "button",
        { type: "button", "aria-pressed": String(each === runner), onclick: () => ((pinned = true), look(each)) },
        each.name,
      );
    replace(
      looking,
      el("span", { class: "note" }, "Shown below:"),
      runners.map(button),
      el("button", { type: "button", onclick: () => download(runner) }, "Download this trace"),
      el("button", { type: "button", onclick: () => open(runner) }, "Open it in Run"),
    );
    replace(heading, runner.plain ? "Plain decoding, step by step" : `The drafter ${runner.name}, step by step`);
  }

  function open(runner) {
    runner.run.title = `Live: ${runner.name}`;
    app.open(runner.run);
    location.hash = "#run";
  }

  /** The run below, as soon as there is something to see of it; while a race is on, only what is quickly drawn. */
  function showRun() {
    if (shown.view) shown.view.update();
    else if (shown.runner.run.steps.length)
      shown.view = mountRun(place, shown.runner.run, { compact: stopper !== null });
  }

  let due = null,
    next = 0,
    frame = null;

  /** Numbers and texts of the cards with the next frame; the run below when it is due. */
  function draw(now = false) {
    frame ??= requestAnimationFrame(() => {
      frame = null;
      for (const runner of runners) runner.card.update(runner);
    });
    if (due && !now) return;
    clearTimeout(due);
    due = setTimeout(drawRun, now ? 0 : Math.max(0, next - performance.now()));
  }

  function drawRun() {
    const begun = performance.now();
    due = null;
    if (shown) showRun();
    const ended = performance.now();
    next = ended + Math.max(DRAW, IDLE * (ended - begun));
  }

  /* ------------------------------------------------------------ words */

  function tell(sentence) {
    status.textContent = sentence;
  }

  function say(sentence) {
    problem.textContent = sentence;
    problem.hidden = !sentence;
  }

  function complain(error) {
    if (error.name === "AbortError") return;
    say(
      error instanceof Refusal || error.constructor.name === "TraceError"
        ? error.message
        : `This page failed: ${error.message}`,
    );
    tell("");
    if (!(error instanceof Refusal)) console.warn(error);
  }

  return { start, stop };
}

function intro() {
  return el(
    "div",
    { class: "intro" },
    el("h1", {}, "Live"),
    el(
      "p",
      {},
      "Your prompt goes to this server, first with a drafter, then to plain decoding: one after the other, so that neither slows the other. " +
        "With the same seed both say the same, token by token, at every temperature; only the time differs. This page checks both. One race is one sample; for a figure to rely on there is ",
      el("code", {}, "outrider bench"),
      ".",
    ),
  );
}

function download(runner) {
  const url = URL.createObjectURL(new Blob([runner.jsonl], { type: "application/x-ndjson" }));
  el("a", { href: url, download: `outrider-${runner.name.replace(/\W+/g, "-")}.jsonl` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

/** This view's own style sheet, where it is used. */
function style() {
  const href = new URL("./live.css", import.meta.url).href;
  if (![...document.styleSheets].some((sheet) => sheet.href === href))
    document.head.append(el("link", { rel: "stylesheet", href }));
}
