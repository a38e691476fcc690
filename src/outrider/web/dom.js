/* Creates elements. Data becomes text and attributes, never markup: nothing in a trace can run. */

const SVG = "http://www.w3.org/2000/svg";

/** el("p", {class: "idea", onclick: f}, "text", child, …) */
export function el(tag, props = {}, ...children) {
  return fill(document.createElement(tag), props, children);
}

export function svg(tag, props = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

function fill(node, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

/** Replace a node's children. */
export function replace(node, ...children) {
  node.replaceChildren(...children.flat().filter((child) => child !== null && child !== undefined));
}

/* ---------------------------------------------------------------- formatting */

export const UNKNOWN = "not recorded";

export function percent(value, digits = 0) {
  return value === null || value === undefined ? UNKNOWN : `${(value * 100).toFixed(digits)}%`;
}

export function fixed(value, digits = 2) {
  return value === null || value === undefined ? UNKNOWN : value.toFixed(digits);
}

export function times(value) {
  return value === null || value === undefined ? UNKNOWN : `${value.toFixed(2)}×`;
}

/** A probability, short enough for a small box. */
export function chance(value) {
  if (value === null || value === undefined) return "–";
  return value.toFixed(value < 0.01 ? 3 : 2).replace(/^0\./, ".");
}

export function micros(value) {
  if (value === null || value === undefined) return UNKNOWN;
  if (value >= 1e6) return `${(value / 1e6).toFixed(2)} s`;
  return value >= 1e3 ? `${(value / 1e3).toFixed(value >= 1e5 ? 0 : 1)} ms` : `${Math.round(value)} µs`;
}

const grouping = new Intl.NumberFormat("en");

export const grouped = (count) => grouping.format(count);

export function plural(count, one, many = `${one}s`) {
  return `${grouped(count)} ${count === 1 ? one : many}`;
}

/** A token's text with visible white space. */
export function visible(text) {
  if (text === "") return "∅";
  return text.replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/\r/g, "␍").replace(/ /g, "·");
}

/** The same, shortened for a small box. */
export function label(text, most = 12) {
  const shown = [...visible(text.slice(0, 4 * most))];
  return shown.length > most ? `${shown.slice(0, most - 1).join("")}…` : shown.join("");
}

/* ---------------------------------------------------------------- fates: one legend for all views */

export const FATES = {
  a: { name: "accepted", text: "accepted from the draft", mark: "✓" },
  b: { name: "bonus", text: "the target’s own token", mark: "◆" },
  r: { name: "rejected", text: "rejected draft", mark: "✗" },
  u: { name: "unreached", text: "never reached", mark: "…" },
  p: { name: "pruned", text: "pruned", mark: "–" },
};

export function legend(...fates) {
  const items = fates.map((fate) => el("li", {}, el("span", { class: `chip ${FATES[fate].name}` }, FATES[fate].text)));
  return el("ul", { class: "legend", "aria-label": "Legend" }, items, signs());
}

/** What the marks for white space mean: they come before the first token of a view. */
export const signs = () =>
  [
    ["·", "a space"],
    ["↵", "a line break"],
  ].map(([sign, meaning]) => el("li", { class: "sign" }, el("dfn", {}, sign), ` ${meaning}`));

/** A colour of the page, for canvases. Reading it computes styles, so it is cached until the theme changes. */
export function colour(name) {
  if (!palette.has(name))
    palette.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
  return palette.get(name);
}

const palette = new Map();
document.addEventListener("outrider:theme", () => palette.clear(), { capture: true });

export const prefersReducedMotion = () => matchMedia("(prefers-reduced-motion: reduce)").matches;
