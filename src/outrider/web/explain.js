/* Explain: ten seconds of a real run on the stage, with six stations as bookmarks and a text for each.

   Every token, probability and time is from the trace. The stage plays by itself once; a reader who prefers less motion
   gets each station as a still picture. Whatever stands above the text of a station has a fixed height, so that the
   buttons never move. */

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
  signs,
  times,
  visible,
} from "./dom.js";
import { exampleSteps, missOf } from "./highlights.js";
import { mountStage } from "./stage.js";
import { SECONDS, STARTS, endOf, makeStory, stationAt } from "./story.js";
import { passAt } from "./trace.js";

const STATIONS = [
  {
    name: "Baseline",
    title: "One pass, one token",
    idea: () => [
      "A language model reads all of the text so far and emits one token. For the next token it runs again, from the first layer to the last: one whole pass, however easy the token is. That is plain decoding, the lower lane. The model that does it is called the ",
      el("dfn", {}, "target"),
      " from here on.",
    ],
    caption: (run) => plainCaption(run),
    rule: "One more token: run the whole model once more.",
    trap: "“One token is little work.” It is little arithmetic, but all the weights are read for it: the pass mostly waits for memory.",
  },
  {
    name: "Draft",
    title: "A cheap drafter guesses ahead",
    idea: () => [
      "A drafter (a small network, or a lookup in the text so far) proposes the next few tokens. ",
      el("dfn", {}, "q"),
      " is the drafter’s probability of a token. Its proposals are only candidates: the target decides.",
    ],
    caption: (run, { accept }) =>
      `Step ${accept.index + 1}: ${accept.source || "the drafter"} proposes ${plural(accept.nodes.length, "token")} in ${micros(accept.us.draft[1])}.`,
    rule: "Draft only as far as the tokens are still likely to be reached.",
    trap: "A drafter that is right but slow: the time that it saves is spent on drafting.",
    figure: (run, { accept }) => stepTable(run, accept, "draft"),
  },
  {
    name: "Verify",
    title: "The target checks them all at once",
    idea: () => [
      "How can the target emit more than one token per pass? A pass over several tokens gives a prediction after each of them. Usually only the last one is useful, because the following tokens are not known yet. The draft is a guess of them: appended to the text, it lets one pass check every position. ",
      el("dfn", {}, "p"),
      " is the target’s probability of a token, drafted or chosen.",
    ],
    caption: (run, { accept }) =>
      `The same step: one pass of the target over ${plural(accept.nodes.length, "drafted token")}, ${micros(accept.us.verify[1])}.`,
    rule: "One pass over the whole draft; at every position the target makes its own choice.",
    trap: "“Extra positions are free.” They are cheap while the machine waits for memory, and cost full price when it is busy.",
    figure: (run, { accept }) => stepTable(run, accept, "verify"),
  },
  {
    name: "Accept",
    title: "The agreeing prefix is kept",
    idea: () => [
      "Where the drafted token equals the target’s choice, the next position was computed on the right text, so the choice there counts too. The agreeing prefix is emitted, and after it the target’s own next token, which the pass has computed anyway.",
    ],
    caption: (run, { accept }) =>
      `${accept.accepted} accepted and ${accept.emitted.length - accept.accepted} of the target’s own: ${plural(accept.emitted.length, "token")} from one pass.`,
    rule: "Keep drafted tokens while each equals the target’s own choice; then add the target’s next one.",
    trap: "Counting a match after a miss: the target computed it from a text that was never emitted.",
    figure: (run, { accept }) => stepTable(run, accept, "settled"),
  },
  {
    name: "Reject",
    title: "The first miss ends it",
    idea: () => [
      "Where the draft is wrong, the target’s own choice is emitted instead, and everything drafted after it is discarded. The text is the same as without any draft. A bad draft costs time, never correctness.",
    ],
    caption: (run, { reject }) => missCaption(run, reject),
    rule: "At the first miss: emit the target’s token, discard the tail, draft again.",
    trap: "Reading rejections as errors. No wrong token was ever in the text; only a little work was wasted.",
    figure: (run, { reject }) => stepTable(run, reject, "settled"),
  },
  {
    name: "Speedup",
    title: "The same text in fewer passes",
    idea: (run) => [
      "The gain is the passes that did not have to run. How many depends on ",
      el("dfn", {}, "α"),
      ", the share of reached drafted tokens that the target accepts, and on ",
      el("dfn", {}, "K"),
      ", how many are drafted. The target is never skipped: it still chooses every token. ",
      el("b", {}, counts(run)),
    ],
    caption: (run) => raceCaption(run),
    rule: "Speculate while the expected tokens per pass outweigh the cost of drafting and of the wider pass.",
    trap: "Looking at α alone. A drafter that is always right gains nothing if it is as slow as the target, or if K is 0.",
  },
];
const LAST = STATIONS.length - 1;

export function mountExplain(element, run, fallback) {
  const [shown, steps] = exampleSteps(run) ? [run, exampleSteps(run)] : [fallback, exampleSteps(fallback)];
  const stage = mountStage(shown),
    frame = makeStory(shown, steps),
    answer = makeAnswer(shown);
  const player = makePlayer(show);
  const dots = STATIONS.map((station, i) =>
    el(
      "button",
      { type: "button", class: "dot", onclick: () => player.visit(i) },
      el("span", { "aria-hidden": "true" }, String(i + 1)),
      el("span", { class: "name" }, station.name),
    ),
  );
  const back = el(
    "button",
    { type: "button", class: "back", onclick: () => player.visit(player.station - 1) },
    "← Back",
  );
  const toggle = el("button", { type: "button", class: "toggle", onclick: player.toggle });
  const next = el("button", { type: "button", class: "primary next", onclick: forward });
  const caption = el("p", { class: "caption" });
  const card = el("article", { class: "station", tabindex: "-1", onpointerdown: player.pause });
  let station = -1;

  function show(second, playing) {
    const now = frame(second);
    stage.show(now);
    answer.show(now.t);
    toggle.textContent = playing ? "❚❚ Pause" : second >= SECONDS ? "↻ Again" : "▶ Play";
    card.setAttribute("aria-live", playing ? "off" : "polite");
    if (station !== player.station) arrive(player.station);
  }

  function arrive(i) {
    station = i;
    dots.forEach((dot, j) =>
      j === i ? dot.setAttribute("aria-current", "step") : dot.removeAttribute("aria-current"),
    );
    back.disabled = i === 0;
    next.textContent = i === LAST ? "The run →" : "Next →";
    caption.textContent = STATIONS[i].caption(shown, steps);
    card.dataset.station = String(i + 1);
    replace(card, stationText(STATIONS[i], i, shown, steps));
  }

  function forward() {
    if (player.station === LAST) location.hash = "#run";
    else player.visit(player.station + 1);
  }

  function key(event) {
    const field = event.target.closest?.("input, select, textarea, summary, a");
    const pressed = event.key === " " && event.target.closest?.("button");
    if (event.altKey || event.ctrlKey || event.metaKey || field || pressed) return;
    const moves = { ArrowRight: 1, PageDown: 1, ArrowLeft: -1, PageUp: -1, Home: -LAST, End: LAST };
    if (event.key === " ") player.toggle();
    else if (event.key in moves) player.visit(player.station + moves[event.key]);
    else return;
    event.preventDefault();
  }

  replace(
    element,
    el("h1", { class: "hush" }, "Explain: how a model emits several tokens per pass"),
    shown === run
      ? null
      : el(
          "p",
          { class: "note" },
          "The open trace lacks what the stage shows (clocks, an accepted and a rejected draft), so this is a bundled run.",
        ),
    el("p", { class: "prompt", tabindex: "0" }, el("b", {}, "Prompt"), " ", shown.prompt || UNKNOWN),
    el("div", { class: "panel show" }, answer.element, whoIsWho(), stage.element, caption),
    el("nav", { class: "pager", "aria-label": "Stations" }, back, toggle, el("span", { class: "dots" }, dots), next),
    card,
  );
  player.begin();
  return { key, hide: player.pause, destroy: () => (player.pause(), stage.destroy()) };
}

/** Who is who on the stage, and the marks for white space: before anything that uses them. */
function whoIsWho() {
  const actors = [
    ["draft", "drafter", "guesses tokens ahead"],
    ["verify", "target", "the model whose text you want"],
    ["plain", "plain decoding", "the target without a drafter"],
  ].map(([hue, name, meaning]) =>
    el("li", {}, el("i", { class: `swatch ${hue}` }), el("dfn", {}, name), ` ${meaning}`),
  );
  return el("ul", { class: "who", "aria-label": "Key" }, actors, signs());
}

/* ---------------------------------------------------------------- playing */

/** Ten seconds that play by themselves, or station by station; `show(second, playing)` draws. */
function makePlayer(show) {
  let second = 0,
    until = SECONDS,
    playing = null;
  const still = () => prefersReducedMotion();

  function draw() {
    show(still() ? endOf(player.station) : second, playing !== null);
  }

  function play(from, to) {
    pause();
    [second, until] = [from, to];
    let then = performance.now();
    const tick = (now) => {
      second = Math.min(until, second + Math.max(0, now - then) / 1000);
      then = now;
      playing = second < until ? requestAnimationFrame(tick) : null;
      player.station = stationAt(second);
      draw();
    };
    playing = requestAnimationFrame(tick);
    player.station =
      second < SECONDS
        ? Math.max(
            0,
            STARTS.findLastIndex((start) => start <= second),
          )
        : LAST;
    draw();
  }

  function pause() {
    if (playing === null) return;
    cancelAnimationFrame(playing);
    playing = null;
    draw();
  }

  const player = {
    station: 0,
    pause,
    toggle: () => (playing !== null ? pause() : second >= SECONDS ? play(0, SECONDS) : play(second, SECONDS)),
    begin: () => (still() ? player.visit(0) : play(0, SECONDS)),
    visit(station) {
      const i = Math.max(0, Math.min(LAST, station));
      if (!still()) return play(STARTS[i], endOf(i));
      pause();
      [player.station, second] = [i, endOf(i)];
      draw();
    },
  };
  return player;
}

/** The end of the text at a moment, by origin; at most a few tokens, in a box of fixed height. */
function makeAnswer(run) {
  const element = el("p", { class: "answer", "aria-label": "The answer so far" });
  let drawn = -1;
  function show(t) {
    const at = passAt(run.race().own, t);
    if (at === drawn) return;
    drawn = at;
    const tokens = [];
    for (let i = at; i >= 0 && tokens.length < 60; i--)
      tokens.unshift(
        ...run
          .textOf(run.steps[i])
          .map((text, j) => el("span", { class: j < run.steps[i].accepted ? "accepted" : "bonus" }, text)),
      );
    replace(element, el("span", {}, tokens));
  }
  return { element, show };
}

/* ---------------------------------------------------------------- a station's text */

function stationText(station, i, run, steps) {
  return [
    el("p", { class: "count" }, `${i + 1} of ${STATIONS.length}: ${station.name}`),
    el("h2", {}, station.title),
    el("p", { class: "idea" }, station.idea(run)),
    station.figure?.(run, steps),
    el(
      "dl",
      { class: "rules" },
      el("div", { class: "rule" }, el("dt", {}, "Decision rule"), el("dd", {}, station.rule)),
      el("div", { class: "trap" }, el("dt", {}, "Failure trap"), el("dd", {}, station.trap)),
    ),
  ];
}

function plainCaption(run) {
  const plain = run.race().plain;
  return plain
    ? `Plain decoding of this prompt: ${plural(plain.passes.length, "token")} in as many passes, ${micros(plain.pass)} each (median).`
    : `The plain run is ${UNKNOWN} in this trace.`;
}

function missCaption(run, step) {
  const miss = missOf(step);
  const own = (token, p) => `“${visible(run.piece(token))}” (p ${chance(p)})`;
  return `Step ${step.index + 1}: drafted ${own(miss.token, miss.p)}, chosen by the target ${own(step.emitted[miss.depth], step.chose?.[miss.depth]?.p)}.`;
}

function raceCaption(run) {
  const race = run.race(),
    speed = run.speedup();
  if (!race.plain) return `The plain run’s clock is ${UNKNOWN}.`;
  return `${plural(race.tokens, "token")} in ${micros(race.ownEnd)}, plain decoding ${micros(race.plain.end)}: ${times(speed)} the plain speed${speed < 1 ? ", a loss" : ""}.`;
}

function counts(run) {
  const { steps, emitted } = run.counts;
  const same = run.race().plain?.same ? ", the same in both runs" : "";
  return `Here: ${plural(emitted, "token")}${same}, in ${plural(steps, "pass", "passes")} instead of ${emitted}: ${fixed(run.tau())} per pass, with α = ${percent(run.alpha())}.`;
}

/** One step as a table: a column for each position, rows for draft, target and emitted; siblings share a column. */
function stepTable(run, step, stage) {
  const judged = stage !== "draft",
    settled = stage === "settled";
  const depth = Math.max(...step.nodes.map((node) => node.depth)) + 1;
  const columns = [...Array(judged ? Math.max(depth, step.emitted.length) : depth).keys()];
  const row = (name, cell) => el("tr", { class: name }, el("th", { scope: "row" }, name), columns.map(cell));
  const rows = [row("draft", (i) => draftCell(run, step, i, judged, settled))];
  if (judged) rows.push(row("target", (i) => targetCell(run, step, i)));
  if (settled) rows.push(row("emitted", (i) => emittedCell(run, step, i)));
  const head = columns.map((i) => el("th", { scope: "col" }, i < depth ? `+${i + 1}` : "next"));
  return el(
    "figure",
    { class: "strip" },
    el(
      "div",
      { class: "wide", tabindex: "0", role: "group", "aria-label": "The step, position by position" },
      el(
        "table",
        { class: "positions" },
        el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "position"), head)),
        el("tbody", {}, rows),
      ),
    ),
    settled ? legend("a", "b", "r", "u") : null,
  );
}

const FEW = 4; // siblings in a column

function draftCell(run, step, i, judged, settled) {
  const nodes = step.nodes
    .filter((node) => node.depth === i)
    .sort((a, b) => "arup".indexOf(a.fate) - "arup".indexOf(b.fate));
  const name = (node) =>
    !settled ? "drafted" : { a: "accepted", r: "rejected", u: "unreached", p: "pruned" }[node.fate];
  const cells = nodes
    .slice(0, FEW)
    .map((node) =>
      el(
        "div",
        {},
        el("code", { class: `chip ${name(node)}` }, visible(run.piece(node.token))),
        el("small", {}, `q ${chance(node.q)}`),
        judged && node.p !== null ? el("small", {}, `p ${chance(node.p)}`) : null,
      ),
    );
  return el("td", {}, cells, nodes.length > FEW ? el("small", {}, `and ${nodes.length - FEW} more`) : null);
}

/** The target's own choices: known for the text that was emitted, not behind a miss. */
function targetCell(run, step, i) {
  if (i >= step.emitted.length) return el("td", { class: "empty" }, "–");
  return el(
    "td",
    {},
    el("code", { class: "chip own" }, visible(run.piece(step.emitted[i]))),
    el("small", {}, `p ${chance(step.chose?.[i]?.p)}`),
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
