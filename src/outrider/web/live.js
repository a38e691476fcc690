/* The Live view: a chat with this server, and beside each answer its race against plain decoding of the same request.

   mountLive(section, app)      app.open(run, title) opens a run for the other views; app.report(message) shows a message

   It shows what the traces in the responses contain and estimates nothing. During a race it spends at most a twentieth
   of the time on drawing, because on one machine the browser and the model share the cores. */

import { el, replace } from "./dom.js";
import { RequestError, drafters } from "./live-api.js";
import { PRESETS, makeForm } from "./live-form.js";
import { Runner, race, request } from "./live-race.js";
import { makeTurn, outcome } from "./live-show.js";

const DRAW = 100; // least milliseconds between two drawings
const IDLE = 20; // least pause after a drawing, in multiples of the time it took

export function mountLive(section, app) {
  const keyed = document.querySelector('meta[name="outrider-key"]')?.content === "1";
  const form = makeForm({ keyed, send, stop, connect, clear });
  const status = el("p", { class: "hush", role: "status" });
  const log = el("div", { class: "chat", role: "log", "aria-label": "Conversation", "aria-live": "off" });
  let messages = [], // of the conversation so far
    current = null; // the turn that is being answered: {turn, runners, stopper, done}

  style();
  replace(section, el("h1", { class: "hush" }, "Live: a chat with this server"), log, status, form.element);
  clear();
  if (!keyed) connect();

  async function connect() {
    try {
      form.setDrafters(await drafters(form.key));
      app.report("");
    } catch (error) {
      fail(error);
    }
  }

  /** Answer, then race. A message that is sent during the plain run ends that run: its answer is complete. */
  async function send() {
    if (!form.valid() || (current && current.runners[0].state !== "done")) return;
    app.report("");
    if (!form.connected) await connect();
    if (!form.connected) return;
    stop();
    await current?.done;
    const settings = form.settings();
    form.fill("");
    const runners = [new Runner(settings.drafter), new Runner("plain decoding", true)];
    const turn = makeTurn(settings, runners, { open });
    if (!messages.length) replace(log);
    log.append(turn.element);
    current = { turn, runners, stopper: new AbortController() };
    current.done = answer(settings, current);
    form.running(true);
    scrollTo(0, document.documentElement.scrollHeight);
    await current.done;
  }

  async function answer(settings, { turn, runners, stopper }) {
    const [own, plain] = runners;
    const asked = [...messages, { role: "user", content: settings.prompt }];
    const changed = (runner) => {
      if (runner === own && own.state === "done") answered(asked, own);
      draw(turn);
    };
    try {
      await race(runners, request(settings, asked), { key: form.key, signal: stopper.signal, changed });
      status.textContent = outcome(own, plain);
    } catch (error) {
      if (own.state !== "done" && form.settings().prompt === "") form.fill(settings.prompt); // to send it again
      fail(error);
    } finally {
      draw(turn, true);
      if (current?.turn === turn) current = null;
      form.running(false);
    }
  }

  function answered(asked, own) {
    messages = [...asked, { role: "assistant", content: own.text }];
    form.running(false, true);
  }

  function stop() {
    if (!current) return;
    current.stopper.abort();
    status.textContent = "Stopped: the request was cancelled and its slots are free.";
  }

  function clear() {
    stop();
    messages = [];
    replace(log, greeting());
  }

  function greeting() {
    const preset = ({ title, prompt }) =>
      el("button", { type: "button", onclick: () => (form.fill(prompt), send()) }, title);
    return el(
      "div",
      { class: "greeting" },
      el(
        "p",
        {},
        "Ask something. The answer comes with a drafter; then the same request runs by plain decoding, and beside the answer you see the race. With the same seed both texts are equal, token by token; only the time differs.",
      ),
      el("p", { class: "presets", role: "group", "aria-label": "Examples" }, PRESETS.map(preset)),
    );
  }

  function open(runner, prompt) {
    runner.run.title = `Live, ${runner.name}`;
    app.open(runner.run, prompt.slice(0, 60));
    location.hash = "#run";
  }

  let due = null,
    next = 0;

  function draw(turn, now = false) {
    if (due && !now) return;
    clearTimeout(due);
    due = setTimeout(
      () => {
        const started = performance.now();
        due = null;
        const follows = document.documentElement.scrollHeight - innerHeight - scrollY < 120; // the reader is at the end
        turn.update();
        if (follows) scrollTo(0, document.documentElement.scrollHeight);
        const ended = performance.now();
        next = ended + Math.max(DRAW, IDLE * (ended - started));
      },
      now ? 0 : Math.max(0, next - performance.now()),
    );
  }

  function fail(error) {
    if (error.name === "AbortError") return;
    const told = error instanceof RequestError || error.constructor.name === "TraceError";
    app.report(told ? error.message : `This page failed: ${error.message}`);
    status.textContent = "";
    if (!told) console.warn(error);
  }

  return {};
}

/** Load this view's style sheet. */
function style() {
  const href = new URL("./live.css", import.meta.url).href;
  if (![...document.styleSheets].some((sheet) => sheet.href === href))
    document.head.append(el("link", { rel: "stylesheet", href }));
}
