/* The draft of one step as a tree: each node with the drafter's q, the target's p, its fate and the reason. */

import { FATES, UNKNOWN, chance, el, fixed, grouped, label, percent, replace, svg, visible } from "./dom.js";
import { ranking } from "./trace.js";

const BOX = { width: 104, height: 52, gapX: 30, gapY: 14 };
const MOST = 160; // nodes drawn per step

export function mountTree(run, { compact }) {
  const picture = el("div", { class: "treebox", tabindex: "0", role: "group", "aria-label": "The draft of this step" });
  const why = el("div", { class: "why", "aria-live": "polite" });
  const element = el(
    "section",
    { class: "panel tree", "aria-label": "The draft" },
    el("h3", {}, "The draft of this step"),
    picture,
    compact ? null : why,
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
    if (!compact) replace(why, chosen === null ? overview(run, step) : reason(run, step, chosen));
  }

  return { element, seek, choose };
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
    svg("text", { x: BOX.width / 2, y: 41, class: "small" }, "committed"),
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
    svg("text", { x: 10, y: 41, class: "small" }, "bonus"),
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

function overview(run, step) {
  const rejected = step.nodes.findIndex((node) => node.fate === "r");
  const sentence = !step.nodes.length
    ? "The controller’s reason: "
    : `${step.accepted} of ${step.nodes.length} drafted tokens equal the target’s own choices${rejected >= 0 ? "; the first miss ended the walk" : ""}. The controller’s reason: `;
  return [
    el("p", {}, sentence, el("q", {}, step.why || UNKNOWN), step.source ? ` Drafted by ${step.source}.` : ""),
    step.failure
      ? el("p", { class: "warning" }, `The drafter failed (${step.failure}); the text continued without it.`)
      : null,
    step.nodes.length ? el("p", { class: "note" }, "Select a node for details.") : null,
  ];
}

function reason(run, step, index) {
  const node = step.nodes[index],
    depth = node.depth;
  const onPath = node.parent < 0 || step.nodes[node.parent].fate === "a";
  const chose = onPath ? step.chose?.[depth] : null;
  return [
    el(
      "h4",
      {},
      el("code", { class: `chip ${FATES[node.fate].name}` }, visible(run.piece(node.token)).slice(0, 80)),
      " ",
      verdict(run, step, node, onPath),
    ),
    el(
      "div",
      { class: "sides" },
      side(run, "The drafter’s top five", ranking(step.guesses?.[node.parent]), node.token, "q", onlyOwn(node)),
      side(
        run,
        "The target’s top five",
        chose?.top ?? [],
        chose?.token,
        "p",
        onPath
          ? `Not recorded (p of this token: ${chance(node.p)}).`
          : "This node was not reached, so there is no choice of the target here.",
      ),
    ),
    noise(run, step, node, depth, onPath),
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

function onlyOwn(node) {
  return node.q === null
    ? "Not recorded; this drafter gives no probabilities."
    : `Not recorded; the drafter gave this token q = ${chance(node.q)}.`;
}

function verdict(run, step, node, onPath) {
  if (node.fate === "a") return "is what the target chose here, so it was kept.";
  if (node.fate === "p") return "was pruned before the pass: its expected gain was less than the cost of its row.";
  if (!onPath) return "was never reached: an earlier token of its path was rejected.";
  const chosen = step.emitted[node.depth];
  if (chosen === undefined) return "came after the end of the text.";
  return [
    "was not kept: the target chose ",
    el("code", { class: "chip bonus" }, visible(run.piece(chosen)).slice(0, 40)),
    " here.",
  ];
}

function side(run, title, top, marked, letter, missing) {
  const bars = top.map(({ token, p }) =>
    el(
      "li",
      { class: token === marked ? "marked" : "" },
      el("code", {}, label(run.piece(token), 18)),
      el("meter", {
        min: 0,
        max: 1,
        value: p ?? 0,
        "aria-label": `${letter} of ${visible(run.piece(token)).slice(0, 40)}`,
      }),
      el("span", { class: "number" }, percent(p, 1)),
    ),
  );
  return el(
    "div",
    {},
    el("h5", {}, title),
    top.length ? el("ol", { class: "top" }, bars) : el("p", { class: "note" }, missing),
  );
}

/** At temperature T > 0 the target chooses the highest ln p / T + g; the noise g depends on the seed only. */
function noise(run, step, node, depth, onPath) {
  if (run.temperature === 0)
    return el("p", { class: "note" }, "Temperature 0: no noise, the likeliest token is chosen.");
  const values = onPath ? step.noise?.[depth] : null,
    chosen = step.emitted[depth];
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
    el("h5", {}, "Gumbel noise at this position"),
    el(
      "p",
      { class: "note" },
      `The token with the highest ln p ÷ ${run.temperature ?? "T"} + g is chosen; the seed determines g for drafter and target alike.`,
    ),
    el("ul", { class: "noise" }, parts),
  );
}
