/* The #run view: race, text and draft of one run at the same step; charts and settings are behind Details.

   mountRun(element, run) -> {seek(step), key(event), destroy()} */

import { mountDials } from "./dials.js";
import { UNKNOWN, el, legend, plural, replace, svg } from "./dom.js";
import { mountPhases } from "./phases.js";
import { mountRace, sentence } from "./race.js";
import { mountRibbon } from "./ribbon.js";
import { mountTree } from "./tree.js";

const SPEEDS = [
  ["real time", 1],
  ["4× slower", 4],
  ["12× slower", 12],
  ["40× slower", 40],
];
const ICONS = {
  first: "M2 3h2v12H2z M10.5 3v12L4.5 9z M16.500 3v12l-6-6z",
  back: "M13 3v12L6.500 9z M3.5 3H6v12H3.5z",
  play: "M4 2.5v13L15.5 9z",
  pause: "M4 3h3.5v12H4z M10.5 3H14v12h-3.5z",
  forward: "M5 3v12l6.5-6z M12 3h2.5v12H12z",
};
const WATCHED = 20e6; // microseconds in which a run plays, unless its reader chooses another speed
const STEP_PAUSE = 300; // milliseconds for a step whose clock is not recorded

export function mountRun(element, run) {
  let at = 0,
    playing = null;
  const seek = (step) => go(Math.max(0, Math.min(run.steps.length - 1, step)));
  const chosen = (step) => (pause(), seek(step));
  const ribbon = mountRibbon(run, { onseek: chosen });
  const tree = mountTree(run);
  const race = mountRace(() => run.race(), { onseek: chosen });
  const phases = mountPhases(run);
  const dials = mountDials(run);
  const bar = controls();
  const facts = el("div", { class: "facts" });
  const result = el("p", { class: "result", "data-number": "speedup" });
  const settings = el("div", { class: "settings" });
  const details = el(
    "details",
    { class: "panel details", ontoggle: () => go(at) }, // what is closed is not kept up to date
    el("summary", {}, "Details: settings, statistics, phases"),
    settings,
    dials.element,
    phases.element,
  );
  const theme = () => requestAnimationFrame(() => (race.draw(), phases.draw()));
  document.addEventListener("outrider:theme", theme);
  element.addEventListener("keydown", keys);
  replace(
    element,
    facts,
    el(
      "div",
      { class: "panels" },
      el("section", { class: "panel", "aria-label": "The race" }, result, race.element),
      bar.element,
      el("section", { class: "panel", "aria-label": "The text" }, legend("a", "b", "r", "u"), ribbon.element),
      tree.element,
      details,
    ),
  );
  begin();

  /** Show the selected sequence from its first step on. */
  function begin() {
    replace(facts, title(run, select));
    replace(settings, describe(run));
    replace(result, sentence(run));
    bar.extend(run.steps.length);
    dials.draw();
    race.draw();
    go(0);
  }

  function go(step) {
    at = step;
    bar.show(at);
    ribbon.seek(at);
    tree.seek(run.steps[at]);
    race.seek(at);
    if (details.open) (phases.seek(at), dials.seek(at));
    ribbon.follow();
  }

  function select(seq) {
    pause();
    run.select(seq);
    ribbon.reset();
    begin();
  }

  /* ------------------------------------------------------------ playing */

  function play() {
    if (at >= run.steps.length - 1) seek(0);
    const race = run.race();
    let moment = race ? race.own[at].at : 0,
      then = performance.now();
    const tick = (now) => {
      const passed = now - then;
      then = now;
      moment += race ? (passed * 1000) / bar.slower() : passed;
      let next = at;
      while (next < run.steps.length - 1 && (race ? race.own[next + 1].at : (next + 1) * STEP_PAUSE) <= moment) next++;
      if (next !== at) seek(next);
      if (at >= run.steps.length - 1) pause();
      else playing = requestAnimationFrame(tick);
    };
    if (!race) moment = at * STEP_PAUSE;
    playing = requestAnimationFrame(tick);
    bar.playing(true);
  }

  function pause() {
    if (playing) cancelAnimationFrame(playing);
    playing = null;
    bar.playing(false);
  }

  function keys(event) {
    const own = event.target.closest("input, select, button, a, summary, [role=button], textarea");
    if (event.altKey || event.ctrlKey || event.metaKey || own) return;
    const moves = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: run.steps.length - 1 };
    if (event.key === " ") playing ? pause() : play();
    else if (event.key in moves && run.steps.length) (pause(), seek(moves[event.key]));
    else return;
    event.preventDefault();
  }

  function controls() {
    const button = (title, sign, act) =>
      el("button", { type: "button", class: "round", "aria-label": title, title, onclick: act }, icon(sign));
    const range = el("input", {
      type: "range",
      min: 0,
      max: 0,
      value: 0,
      "aria-label": "Step",
      oninput: () => (pause(), seek(Number(range.value))),
    });
    const where = el("output", { class: "where" });
    const lasts = run.race()?.ownEnd ?? WATCHED,
      slowest = SPEEDS.findLast(([, by]) => by * lasts <= WATCHED)?.[1] ?? 1;
    const toggle = button("Play", "play", () => (playing ? pause() : play()));
    const speed = el(
      "select",
      { "aria-label": "Speed" },
      SPEEDS.map(([name, by]) => el("option", { value: by, selected: by === slowest }, name)),
    );
    const node = el(
      "div",
      { class: "controls" },
      button("First step", "first", () => (pause(), seek(0))),
      button("Step back", "back", () => (pause(), seek(at - 1))),
      toggle,
      button("Step forward", "forward", () => (pause(), seek(at + 1))),
      range,
      where,
      speed,
    );
    const bar = {
      element: node,
      extend: (count) => (range.max = String(count - 1)),
      show: (step) => {
        range.value = String(step);
        where.textContent = `step ${step + 1} of ${run.steps.length}`;
        range.setAttribute("aria-valuetext", where.textContent);
      },
      slower: () => Number(speed.value),
      playing: (on) => {
        replace(toggle, icon(on ? "pause" : "play"));
        toggle.setAttribute("aria-label", on ? "Pause" : "Play");
        toggle.title = on ? "Pause" : "Play";
      },
    };
    return bar;
  }

  function destroy() {
    pause();
    for (const each of [race, phases, dials]) each.destroy();
    document.removeEventListener("outrider:theme", theme);
    element.removeEventListener("keydown", keys);
    replace(element);
  }

  return { seek: chosen, hide: pause, destroy, key: keys };
}

function icon(name) {
  return svg("svg", { viewBox: "0 0 18 18", "aria-hidden": "true" }, svg("path", { d: ICONS[name] }));
}

const named = (value) =>
  typeof value === "string" || typeof value === "number" ? String(value).slice(0, 80) : UNKNOWN;

/** The prompt is the title of a run; who took part in it; the choice of the sequence, where there are several. */
function title(run, select) {
  const option = (seq) => el("option", { value: seq, selected: seq === run.seq }, String(seq));
  const many = el("select", { onchange: (event) => select(Number(event.target.value)) }, run.sequences.map(option));
  const actors = [
    "The ",
    el("dfn", {}, "target"),
    ` (${named(run.header?.model)}) chooses every token; the `,
    el("dfn", {}, "drafter"),
    ` (${named(run.header?.drafter)}) proposes some.`,
  ];
  return [
    el("h1", {}, (run.prompt || run.title || "A run without its prompt").slice(0, 400)),
    el("p", { class: "note" }, run.prompt && run.title ? `${run.title.slice(0, 120)}. ` : "", actors),
    run.sequences.length > 1 ? el("label", {}, "Sequence ", many) : null,
  ];
}

/** Model, drafter and settings of the run, and the whole prompt. */
function describe(run) {
  const header = run.header ?? {};
  const prompt = typeof header.prompt_text === "string" ? header.prompt_text.slice(0, 20_000) : null;
  const tokens = plural(Array.isArray(header.prompt) ? header.prompt.length : 0, "token");
  const facts = [
    `${named(header.model)} (${named(header.dtype)}, ${named(header.device)})`,
    `drafter ${named(header.drafter)}, K ${named(header.k)}`,
    `rule ${named(header.rule)}`,
    `temperature ${run.temperature ?? UNKNOWN}`,
    run.footer?.finish ? `ended by ${named(run.footer.finish)}` : null,
  ];
  return [
    el("p", { class: "note" }, `${facts.filter(Boolean).join("; ")}.`),
    prompt
      ? el("details", {}, el("summary", {}, `The whole prompt, ${tokens}`), el("pre", { tabindex: "0" }, prompt))
      : null,
  ];
}
