/* The #run view: text, draft tree, race and statistics of one run, all at the same step.

   mountRun(element, run, {compact, title}) -> {update(), seek(step), destroy()}
   Call `update` after run.push(…): a view at the last step follows the run. */

import { mountDials } from "./dials.js";
import { UNKNOWN, el, legend, plural, replace, svg } from "./dom.js";
import { mountLanes } from "./lanes.js";
import { mountRibbon } from "./ribbon.js";
import { firstLook } from "./highlights.js";
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
const STEP_PAUSE = 300; // milliseconds for a step whose clock is not recorded

export function mountRun(element, run, options = {}) {
  const compact = Boolean(options.compact);
  let at = run.footer && !compact ? firstLook(run) : run.steps.length - 1,
    playing = null,
    drawn = -1;
  const seek = (step) => go(Math.max(0, Math.min(run.steps.length - 1, step)));
  const ribbon = mountRibbon(run, { onseek: (step) => (pause(), seek(step)), compact });
  const tree = mountTree(run, { compact });
  const lanes = mountLanes(run, { onseek: (step) => (pause(), seek(step)) });
  const dials = mountDials(run, { compact });
  const bar = controls();
  const facts = el("div", { class: "facts" });
  const theme = () => requestAnimationFrame(() => run.steps.length && lanes.draw());
  document.addEventListener("outrider:theme", theme);
  element.classList.add("run");
  element.addEventListener("keydown", keys);
  const body = el(
    "div",
    { class: "panels" },
    bar.element,
    el("section", { class: "panel", "aria-label": "The text" }, legend("a", "b", "r", "u"), ribbon.element),
    tree.element,
    lanes.element,
    dials.element,
  );
  const waiting = el("p", { class: "note" }, "Waiting for the first step …");
  replace(element, facts, waiting, body);
  update();

  function update() {
    body.hidden = !run.steps.length;
    waiting.hidden = !body.hidden;
    replace(facts, describe(run, options, select));
    if (!run.steps.length) return;
    const followed = at < 0 || (bar.last >= 0 && at >= bar.last);
    bar.extend(run.steps.length);
    if (drawn !== run.version) {
      dials.draw();
      lanes.draw();
      drawn = run.version;
    }
    go(followed ? run.steps.length - 1 : at);
  }

  function go(step) {
    at = step;
    bar.show(at);
    ribbon.seek(at);
    tree.seek(run.steps[at]);
    lanes.seek(at);
    dials.seek(at);
    ribbon.follow();
  }

  function select(seq) {
    pause();
    run.select(seq);
    ribbon.reset();
    at = -1;
    update();
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
    const toggle = button("Play", "play", () => (playing ? pause() : play()));
    const speed = el(
      "select",
      { "aria-label": "Speed" },
      SPEEDS.map(([name, by]) => el("option", { value: by, selected: by === 12 }, name)),
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
      last: -1,
      extend: (count) => ((bar.last = count - 1), (range.max = String(count - 1))),
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
    lanes.destroy();
    dials.destroy();
    document.removeEventListener("outrider:theme", theme);
    element.removeEventListener("keydown", keys);
    replace(element);
  }

  return { update, seek: (step) => (pause(), seek(step)), destroy, play, key: keys };
}

function icon(name) {
  return svg("svg", { viewBox: "0 0 18 18", "aria-hidden": "true" }, svg("path", { d: ICONS[name] }));
}

/** Model, drafter, settings and prompt of the run. */
function describe(run, { title, compact }, select) {
  const header = run.header ?? {},
    text = (value) => (typeof value === "string" || typeof value === "number" ? String(value).slice(0, 80) : UNKNOWN);
  const temperature = run.temperature === null ? UNKNOWN : String(run.temperature);
  const prompt = typeof header.prompt_text === "string" ? header.prompt_text.slice(0, 20000) : null;
  const many =
    run.sequences.length > 1
      ? el(
          "label",
          {},
          "Sequence ",
          el(
            "select",
            { onchange: (event) => select(Number(event.target.value)) },
            run.sequences.map((seq) => el("option", { value: seq, selected: seq === run.seq }, String(seq))),
          ),
        )
      : null;
  return [
    title || run.title ? el(compact ? "h2" : "h1", {}, (title || run.title).slice(0, 120)) : null,
    el(
      "p",
      { class: "note" },
      `${text(header.model)} (${text(header.dtype)}, ${text(header.device)}) · drafter ${text(header.drafter)}, K ${text(header.k)} · rule ${text(header.rule)} · temperature ${temperature}` +
        (run.footer?.finish ? ` · ended by ${text(run.footer.finish)}` : ""),
    ),
    many,
    prompt
      ? el(
          "details",
          {},
          el("summary", {}, `The prompt, ${plural(Array.isArray(header.prompt) ? header.prompt.length : 0, "token")}`),
          el("pre", { tabindex: "0" }, prompt),
        )
      : null,
  ];
}
