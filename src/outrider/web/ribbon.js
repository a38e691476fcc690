/* The ribbon: the text, each step a tint, accepted solid, the target's own outlined, rejected drafts struck out at the
   caret: a chain in the line, the branches of a tree below each other.

   Only a window of steps around the caret is in the document, and moving the caret changes only steps' classes and the
   struck-out tokens, so that a run of thousands of steps scrubs as smoothly as a short one. */

import { FATES, el, grouped, replace, visible } from "./dom.js";

const CHUNK = 50; // steps are added and dropped in chunks
const AROUND = 1; // chunks before and after the caret's own
const WHOLE = 300; // steps up to which the whole run is in the document
const BRANCHES = 4; // rejected branches of a tree that are written out

export function mountRibbon(run, { onseek }) {
  const flow = el("div", { class: "flow" });
  const before = el("p", { class: "elsewhere" });
  const after = el("p", { class: "elsewhere" });
  const box = el(
    "div",
    {
      class: "ribbon",
      tabindex: "0",
      role: "group",
      "aria-label": "The text, step by step",
    },
    before,
    flow,
    after,
  );
  const ghosts = el("span", { class: "ghosts" });
  let low = 0,
    high = 0,
    at = -1,
    shown = []; // the window's steps [low, high), and their elements

  flow.addEventListener("click", (event) => {
    const target = event.target.closest("[data-step]");
    if (target) onseek(Number(target.dataset.step));
  });

  function window_(step) {
    const count = run.steps.length;
    if (count <= WHOLE) return [0, count];
    const chunk = Math.floor(step / CHUNK);
    return [Math.max(0, (chunk - AROUND) * CHUNK), Math.min(count, (chunk + AROUND + 1) * CHUNK)];
  }

  function seek(step) {
    const [from, to] = window_(step);
    if (from !== low || to !== high) redraw(from, to, step);
    else mark(step);
    at = step;
    showRejected(run.steps[step]);
  }

  function redraw(from, to, step) {
    if (from === low && to > high && shown.length) {
      const more = make(high, to, step); // a live run grows at the end
      flow.append(...more);
      shown.push(...more);
      high = to;
      mark(step);
      return;
    }
    shown = make(from, to, step);
    [low, high] = [from, to];
    replace(flow, shown);
    before.textContent = from > 0 ? `… ${grouped(from)} steps before` : "";
    after.textContent = to < run.steps.length ? `${grouped(run.steps.length - to)} steps to come …` : "";
  }

  function make(from, to, step) {
    const made = [];
    for (let i = from; i < to; i++) made.push(stepElement(run, run.steps[i], className(i, step)));
    return made;
  }

  function mark(step) {
    if (at < 0 || step === at) return;
    for (let i = Math.max(low, Math.min(at, step)); i <= Math.min(high - 1, Math.max(at, step)); i++)
      shown[i - low].className = className(i, step);
  }

  /** The current step's rejected and unreached tokens, struck out before the target's own token. */
  function showRejected(step) {
    const branches = rejectedBranches(step);
    const rows = branches.slice(0, BRANCHES).map((nodes) =>
      el(
        "span",
        { class: "branch" },
        nodes.slice(0, 12).map((node) => el("s", { class: FATES[node.fate].name }, visible(run.piece(node.token)))),
      ),
    );
    const more = branches.length > BRANCHES ? el("small", {}, `and ${branches.length - BRANCHES} more`) : null;
    replace(ghosts, rows, more);
    ghosts.hidden = !branches.length;
    const element = shown[step.index - low];
    element.insertBefore(ghosts, element.querySelector(".bonus"));
  }

  /** Scroll to the caret. It reads the layout, so it is called after all changes. */
  function follow() {
    const element = shown[at - low],
      room = box.clientHeight;
    if (!element || box.scrollHeight <= room) return;
    const top = element.offsetTop;
    if (top < box.scrollTop + 8 || top > box.scrollTop + room - 56) box.scrollTop = Math.max(0, top - room * 0.5);
  }

  return { element: box, seek, follow, reset: () => ((low = high = 0), (at = -1), (shown = [])) };
}

/** Paths of the draft that were not kept, from where they leave the text to their leaf. A chain has one at most. */
function rejectedBranches({ nodes }) {
  const lost = (node) => node.fate === "r" || node.fate === "u";
  const parents = new Set(nodes.filter(lost).map((node) => node.parent));
  return nodes.flatMap((leaf, i) => {
    if (!lost(leaf) || parents.has(i)) return [];
    const path = [];
    for (let node = leaf; node && lost(node); node = nodes[node.parent]) path.unshift(node);
    return [path];
  });
}

function className(i, caret) {
  return `step tint${i % 2}${i > caret ? " future" : i === caret ? " current" : ""}`;
}

export function stepElement(run, step, name) {
  const texts = run.textOf(step);
  const tokens = texts.map((text, i) => tokenElement(text, i < step.accepted ? "accepted" : "bonus"));
  return el("span", { class: name, "data-step": step.index }, tokens);
}

/** The marks ↵ and ∅ are drawn by the style sheet: they are not part of the text. */
function tokenElement(text, origin) {
  const token = el("span", { class: text ? origin : `${origin} nothing` });
  text.split(/(\n)/).forEach((part) => {
    if (part === "\n") token.append(el("i", { "aria-hidden": "true" }), "\n");
    else if (part) token.append(part);
  });
  return token;
}
