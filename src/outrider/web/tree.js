/* The draft of one step as a tree: each node with the drafter's q, the target's p, its fate and the reason. */

import { FATES, UNKNOWN, chance, el, fixed, grouped, label, percent, replace, svg, visible } from "./dom.js";
import { missOf } from "./highlights.js";
import { ranking } from "./trace.js";

const BOX = { width: 104, height: 52, gapX: 30, gapY: 14 };
const MOST = 160; // nodes drawn per step

export function mountTree(run) {
  const picture = el("div", { class: "treebox", tabindex: "0", role: "group", "aria-label": "The draft of this step" });
  const why = el("div", { class: "why", "aria-live": "polite" });
  const element = el(
    "section",
    { class: "panel tree", "aria-label": "The draft" },
    el("h2", {}, "The draft of this step"),
    el(
      "p",
      { class: "note" },
      el("dfn", {}, "q"),
      " is the drafter’s probability of a token, ",
      el("dfn", {}, "p"),
      " the target’s.",
    ),
    picture,
    why,
  );
  let step = null,
    chosen = null;

  function seek(next) {
    if (next === step) return;
    step = next;
    chosen = null;
    draw();
  }

  function draw() {
    replace(picture, step.nodes.length ? drawing(run, step, chosen, choose) : plainStep(run, step));
    explain();
  }

  function choose(node) {
    chosen = chosen === node ? null : node;
    for (const group of picture.querySelectorAll("g.node"))
      group.setAttribute("aria-pressed", String(Number(group.dataset.node) === chosen));
    explain();
  }

  function explain() {
    replace(why, chosen === null ? overview(step) : reason(run, step, chosen));
  }

  return { element, seek };
}

/* ---------------------------------------------------------------- the drawing */

function drawing(run, step, chosen, choose) {
  const nodes = step.nodes.slice(0, MOST);
  const { places, columns, rows } = layout(nodes);
  const bonus = bonusPlace(step, nodes, places);
  const width = (Math.max(columns, bonus ? bonus.x + 1 : 0) + 1) * (BOX.width + BOX.gapX) - BOX.gapX + 8;
  const height = Math.max(rows, bonus ? bonus.y + 1 : 0) * (BOX.height + BOX.gapY) + 4;
  const at = (place) => ({ x: 4 + (place.x + 1) * (BOX.width + BOX.gapX), y: 2 + place.y * (BOX.height + BOX.gapY) });
  const root = { x: 4, y: 2 };
  const edges = [],
    boxes = [rootBox(run, step, root)];
  nodes.forEach((node, i) => {
    const from = node.parent < 0 ? root : at(places[node.parent]);
    edges.push(edge(from, at(places[i]), FATES[node.fate].name));
    boxes.push(nodeBox(run, node, i, at(places[i]), chosen === i, choose));
  });
  if (bonus) {
    edges.push(edge(bonus.from === null ? root : at(places[bonus.from]), at(bonus), "bonus"));
    boxes.push(bonusBox(run, step, at(bonus)));
  }
  const left = step.nodes.length - nodes.length;
  const image = svg(
    "svg",
    { width, height, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": "Drafted tokens" },
    edges,
    boxes,
  );
  return [image, left ? el("p", { class: "note" }, `${grouped(left)} more nodes are not drawn.`) : null];
}

/** Depth to the right; every leaf has its own row, and a parent is in the row of its first child. */
function layout(nodes) {
  const children = new Map();
  nodes.forEach((node, i) => children.set(node.parent, [...(children.get(node.parent) ?? []), i]));
  const places = [];
  let rows = 0,
    columns = 0;
  const stack = [...(children.get(-1) ?? [])].reverse();
  let fresh = true;
  while (stack.length) {
    const i = stack.pop();
    if (fresh) rows++;
    places[i] = { x: nodes[i].depth, y: rows - 1 };
    columns = Math.max(columns, nodes[i].depth + 1);
    const below = children.get(i) ?? [];
    fresh = !below.length;
    stack.push(...[...below].reverse());
  }
  return { places, columns, rows: Math.max(rows, 1) };
}

/** The target's own token follows the last accepted node, in the first free row. */
function bonusPlace(step, nodes, places) {
  if (step.emitted.length <= step.accepted) return null;
  let last = null;
  nodes.forEach((node, i) => {
    if (node.fate === "a" && (last === null || node.depth > nodes[last].depth)) last = i;
  });
  const x = last === null ? 0 : nodes[last].depth + 1;
  const taken = new Set(places.filter((place) => place.x >= x).map((place) => place.y));
  let y = last === null ? 0 : places[last].y;
  while (taken.has(y)) y++;
  return { x, y, from: last };
}

function edge(from, to, name) {
  const x = from.x + BOX.width,
    y = from.y + BOX.height / 2,
    end = to.y + BOX.height / 2,
    middle = (x + to.x) / 2;
  return svg("path", { class: `edge ${name}`, d: `M${x},${y} C${middle},${y} ${middle},${end} ${to.x},${end}` });
}

function rootBox(run, step, { x, y }) {
  const before = step.index > 0 ? run.steps[step.index - 1] : null;
  const text = before ? label(run.textOf(before).at(-1) ?? "", 11) : "the prompt";
  return svg(
    "g",
    { class: "root", transform: `translate(${x},${y})` },
    svg("rect", { width: BOX.width, height: BOX.height, rx: 8 }),
    svg("text", { x: BOX.width / 2, y: 22, class: "token" }, text),
    svg("text", { x: BOX.width / 2, y: 41, class: "small" }, "text so far"),
  );
}

function nodeBox(run, node, i, { x, y }, pressed, choose) {
  const fate = FATES[node.fate],
    text = label(run.piece(node.token), 11);
  const description = `${visible(run.piece(node.token)).slice(0, 40)}: ${fate.text}, q ${chance(node.q)}, p ${chance(node.p)}`;
  const pick = () => choose(i);
  const keys = (event) => {
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      event.stopPropagation();
      pick();
    }
  };
  const props = {
    class: `node ${fate.name}`,
    transform: `translate(${x},${y})`,
    "data-node": i,
    role: "button",
    tabindex: "0",
    "aria-pressed": String(pressed),
    "aria-label": description,
    onclick: pick,
    onkeydown: keys,
  };
  const struck = node.fate === "r" || node.fate === "u";
  return svg(
    "g",
    props,
    svg("rect", { width: BOX.width, height: BOX.height, rx: 8 }),
    svg("text", { x: BOX.width / 2, y: 20, class: `token${struck ? " struck" : ""}` }, text),
    svg("text", { x: 10, y: 41, class: "small" }, `q ${chance(node.q)}`),
    svg("text", { x: BOX.width - 10, y: 41, class: "small end" }, `p ${chance(node.p)}`),
    svg("text", { x: BOX.width - 6, y: 12, class: "mark" }, fate.mark),
  );
}

function bonusBox(run, step, { x, y }) {
  const chose = step.chose?.[step.emitted.length - 1];
  return svg(
    "g",
    { class: "node bonus", transform: `translate(${x},${y})` },
    svg("rect", { width: BOX.width, height: BOX.height, rx: 8 }),
    svg("text", { x: BOX.width / 2, y: 20, class: "token" }, label(run.piece(step.emitted.at(-1)), 11)),
    svg("text", { x: 10, y: 41, class: "small" }, "target"),
    svg("text", { x: BOX.width - 10, y: 41, class: "small end" }, `p ${chance(chose?.p)}`),
  );
}

function plainStep(run, step) {
  const tokens = step.emitted.map((id) => el("code", { class: "chip bonus" }, visible(run.piece(id)).slice(0, 80)));
  return el(
    "p",
    { class: "note" },
    "Nothing was drafted in this step: one pass, one token. The target chose ",
    tokens,
    ".",
  );
}

/* ---------------------------------------------------------------- why */

function overview(step) {
  const judged = step.nodes.length
    ? `${step.accepted} of ${step.nodes.length} drafted tokens were accepted${missOf(step) ? "; at the next position the target chose another token than the draft" : ""}. `
    : "";
  return [
    el(
      "p",
      {},
      judged,
      step.source ? `Drafted by ${step.source}. ` : "",
      "The controller: ",
      el("q", {}, step.why || UNKNOWN),
    ),
    step.failure
      ? el("p", { class: "warning" }, `The drafter failed (${step.failure}); the text continued without it.`)
      : null,
    step.nodes.length ? el("p", { class: "note" }, "Select a node for details.") : null,
  ];
}

/** Why a node was kept or not. What the target chose is known only where the node was reached. */
function reason(run, step, index) {
  const node = step.nodes[index];
  const reached = (node.parent < 0 || step.nodes[node.parent].fate === "a") && node.depth < step.emitted.length;
  const chose = reached ? (step.chose?.[node.depth] ?? null) : null;
  const guesses = ranking(step.guesses?.[node.parent]);
  return [
    el(
      "h3",
      {},
      el("code", { class: `chip ${FATES[node.fate].name}` }, visible(run.piece(node.token)).slice(0, 80)),
      " ",
      verdict(run, step, node, reached),
    ),
    el("p", { "data-number": "chances" }, chances(node, reached)),
    el(
      "div",
      { class: "sides" },
      guesses.length ? side(run, "drafter", withToken(guesses, node.token, node.q), node.token) : null,
      chose?.top.length ? side(run, "target", withToken(chose.top, chose.token, chose.p), chose.token) : null,
    ),
    reached ? noise(run, step, node) : null,
    chose
      ? el(
          "p",
          { class: "note" },
          "Margin, the gap between the two highest logits: ",
          el("b", {}, fixed(chose.margin)),
          ". A small margin means that the target was uncertain.",
        )
      : null,
  ];
}

function verdict(run, step, node, reached) {
  if (node.fate === "a") return "was kept: it is what the target chose here.";
  if (node.fate === "p") return "was pruned before the pass: its expected gain was less than the cost of its row.";
  if (!reached)
    return node.parent < 0 || step.nodes[node.parent].fate === "a"
      ? "was not needed: the text had ended."
      : "was never reached: an earlier token of its branch was rejected.";
  return [
    "was not kept: the target chose ",
    el("code", { class: "chip bonus" }, visible(run.piece(step.emitted[node.depth])).slice(0, 40)),
    " here.",
  ];
}

/** Behind a rejected token p is the target's as well, but after a text that was not emitted. */
function chances(node, reached) {
  const q = node.q === null ? `q is ${UNKNOWN}` : `q ${chance(node.q)}`,
    p = node.p === null ? `p is ${UNKNOWN}` : `p ${chance(node.p)}`;
  return reached || node.p === null
    ? `${q}, ${p}.`
    : `${q}, ${p} after the tokens of its branch, which were not emitted.`;
}

/** The likeliest tokens, and the token in question even if it is not among them. */
function withToken(top, token, p) {
  return top.some((each) => each.token === token) ? top : [...top, { token, p }];
}

function side(run, actor, top, marked) {
  const letter = actor === "drafter" ? "q" : "p";
  const bars = top.map(({ token, p }) =>
    el(
      "li",
      { class: token === marked ? "marked" : "" },
      el("code", {}, label(run.piece(token), 18)),
      el("meter", {
        class: actor,
        min: 0,
        max: 1,
        value: p ?? 0,
        "aria-label": `${letter} of ${visible(run.piece(token)).slice(0, 40)}`,
      }),
      el("span", { class: "number" }, percent(p, 1)),
    ),
  );
  const title =
    actor === "drafter" ? "q: the drafter’s likeliest, and its draft" : "p: the target’s likeliest, and its choice";
  return el("div", { class: actor }, el("p", { class: "title" }, title), el("ol", { class: "top" }, bars));
}

/** At temperature T > 0 the target chooses the highest ln p / T + g; the noise g depends on the seed only. */
function noise(run, step, node) {
  if (run.temperature === 0)
    return el("p", { class: "note" }, "Temperature 0: no noise, the likeliest token is chosen.");
  const values = step.noise?.[node.depth],
    chosen = step.emitted[node.depth];
  if (!values) return el("p", { class: "note" }, `Noise: ${UNKNOWN}.`);
  const parts = [chosen, node.token]
    .filter((token, i, all) => token !== undefined && all.indexOf(token) === i && typeof values[token] === "number")
    .map((token) =>
      el(
        "li",
        {},
        el("code", {}, label(run.piece(token), 18)),
        ` g = ${fixed(values[token])}`,
        token === chosen ? " (chosen)" : "",
      ),
    );
  return el(
    "div",
    {},
    el("p", { class: "title" }, "Gumbel noise at this position"),
    el(
      "p",
      { class: "note" },
      `The token with the highest ln p ÷ ${run.temperature ?? "T"} + g is chosen; the seed determines g for drafter and target alike.`,
    ),
    el("ul", { class: "noise" }, parts),
  );
}
