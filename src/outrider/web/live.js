/* The Live view: send a prompt to this server and race a drafter against plain decoding of the same request.

   mountLive(section, app)      app.open(run, title) shows a run in the other views

   It shows what the traces in the responses contain and estimates nothing. During a race it spends at most a twentieth
   of the time on drawing steps, because on one machine the browser and the model share the cores. */

import { el, replace } from "./dom.js";
import { RequestError, drafters } from "./live-api.js";
import { makeForm } from "./live-form.js";
import { Runner, race, request } from "./live-race.js";
import { makeCard, makeScores, outcome, verdict } from "./live-show.js";
import { mountRun } from "./view.js";

const DRAW = 250; // least milliseconds between two drawings of a growing run
const IDLE = 20; // least pause after a drawing, in multiples of the time it took

export function mountLive(section, app) {
  const keyed = document.querySelector('meta[name="outrider-key"]')?.content === "1";
  const form = makeForm({ keyed, start, stop, compare, connect });
  const status = el("p", { class: "note", role: "status", "aria-live": "polite" });
  const problem = el("p", { class: "live-problem", role: "alert", hidden: true });
  const cards = el("div", { class: "runners" });
  const verdicts = el("div", { class: "verdicts" });
  const looking = el("div", { class: "looking", role: "group", "aria-label": "Which run is shown below" });
  const heading = el("h2", {});
  const body = el("div", { class: "live-run" });
  const scores = makeScores();
  let runners = [],
    shown = null,
    pinned = false,
    stopper = null;

  style();
  replace(section, intro(), form.element, status, problem, cards, verdicts, scores.element, looking, heading, body);
  if (!keyed) connect();

  /* ------------------------------------------------------------ connection */

  async function connect() {
    try {
      form.setDrafters(await drafters(form.key));
      report("");
    } catch (error) {
      fail(error);
    }
  }

  /* ------------------------------------------------------------ race */

  async function start(title = "your prompt") {
    if (stopper || !form.valid()) return;
    report("");
    if (!form.connected) await connect();
    if (!form.connected) return;
    stopper = new AbortController();
    form.running(true);
    try {
      await one(form.settings(), title);
    } catch (error) {
      fail(error);
    } finally {
      stopper = null;
      form.running(false);
      if (shown) look(shown.runner); // now with all panels
      draw(true);
    }
  }

  /** Race each preset against plain decoding; the scores are listed together. */
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
      if (runner.state === "running" && !runner.announced) announce(`${runner.name} is running.`);
      runner.announced = runner.state === "running";
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
    announce(drafted.map((runner) => outcome(runner, plain)).join(" "));
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
    announce("Stopped: the request was cancelled and its slots are free.");
  }

  /* ------------------------------------------------------------ the shown run */

  function look(runner) {
    shown?.view?.destroy();
    shown = { runner, view: null };
    replace(body, el("p", { class: "note" }, "Waiting for the first step …"));
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

  /** Draw the shown run as soon as it has a step; during a race without its slow panels. */
  function showRun() {
    if (shown.view) shown.view.update();
    else if (shown.runner.run.steps.length)
      shown.view = mountRun(body, shown.runner.run, { compact: stopper !== null });
  }

  let due = null,
    next = 0,
    frame = null;

  /** Update the cards with the next frame, and the shown run when it is due. */
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
    const started = performance.now();
    due = null;
    if (shown) showRun();
    const ended = performance.now();
    next = ended + Math.max(DRAW, IDLE * (ended - started));
  }

  /* ------------------------------------------------------------ messages */

  function announce(message) {
    status.textContent = message;
  }

  function report(message) {
    problem.textContent = message;
    problem.hidden = !message;
  }

  function fail(error) {
    if (error.name === "AbortError") return;
    report(
      error instanceof RequestError || error.constructor.name === "TraceError"
        ? error.message
        : `This page failed: ${error.message}`,
    );
    announce("");
    if (!(error instanceof RequestError)) console.warn(error);
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
      "Your prompt is answered by this server twice, with a drafter and by plain decoding, one after the other so that neither slows the other. " +
        "With the same seed both texts are equal, token by token, at every temperature; only the time differs. This page checks both. One race is one sample; for reliable figures use ",
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

/** Load this view's style sheet. */
function style() {
  const href = new URL("./live.css", import.meta.url).href;
  if (![...document.styleSheets].some((sheet) => sheet.href === href))
    document.head.append(el("link", { rel: "stylesheet", href }));
}
