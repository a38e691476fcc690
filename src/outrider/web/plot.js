/* Plots by uPlot in the page's colours, each with a text alternative. */

import uPlot from "./vendor/uPlot.js";
import { colour, el } from "./dom.js";

/* series: [{label, hue, kind: "line" | "steps" | "points" (rings) | "spots"}]; data: [xs, ys, …]; a null is a gap. */
export function mountPlot({ title, summary, x, y, series, height = 190, range = {} }) {
  const container = el("div", { class: "plot", role: "img", "aria-label": `${title}. ${summary}` });
  const caption = el("figcaption", {}, summary);
  const keys =
    series.length > 1
      ? el(
          "ul",
          { class: "keys" },
          series.map((s) => el("li", {}, el("i", { class: `key ${s.kind} hue-${s.hue}` }), s.label)),
        )
      : null;
  const element = el("figure", { class: "figure" }, el("p", { class: "title" }, title), keys, container, caption);
  const line = el("div", { class: "cursorline", hidden: true });
  let plot = null,
    data = series.map(() => []),
    at = null;
  data.unshift([]);

  function make() {
    const width = container.clientWidth;
    if (!width) return;
    plot?.destroy();
    plot = new uPlot(options(width), data, container);
    plot.over.append(line);
    move(at);
  }

  function options(width) {
    return {
      width,
      height,
      legend: { show: false },
      cursor: { show: false },
      padding: [8, 8, 0, 0],
      scales: {
        x: { time: false, range: range.x ?? padded },
        y: { range: range.y ?? ((u, low, high) => [0, (high || 1) * 1.1]) },
      },
      axes: [axis(x, 40), axis(y, 54)],
      series: [{}, ...series.map(asSeries)],
      hooks: { draw: [() => move(at)] }, // scales settle after the data are set
    };
  }

  function move(value) {
    at = value;
    line.hidden = value === null || !plot;
    if (!line.hidden) line.style.transform = `translateX(${Math.round(plot.valToPos(value, "x"))}px)`;
  }

  function set(next, text) {
    data = next;
    if (text) {
      caption.textContent = text;
      container.setAttribute("aria-label", `${title}. ${text}`);
    }
    if (plot) plot.setData(data);
    else make();
    move(at);
  }

  function fit() {
    if (!plot) make();
    else if (plot.width !== container.clientWidth && container.clientWidth)
      plot.setSize({ width: container.clientWidth, height });
  }

  const watcher = new ResizeObserver(() => requestAnimationFrame(fit)); // later: a resize inside the callback would notify the observer again
  watcher.observe(container);
  const recolour = () => plot?.redraw();
  document.addEventListener("outrider:theme", recolour);
  const destroy = () => (
    watcher.disconnect(),
    document.removeEventListener("outrider:theme", recolour),
    plot?.destroy()
  );
  return { element, set, move, destroy };
}

/** From the data: uPlot passes the current scale, which would grow with every drawing. */
function padded(u) {
  const xs = u.data[0],
    low = xs[0] ?? 0,
    high = xs[xs.length - 1] ?? 1;
  return low === high ? [low - 0.5, high + 0.5] : [low, high];
}

function axis(name, size) {
  const font = "12px system-ui, sans-serif";
  return {
    label: name,
    labelSize: 18,
    labelFont: font,
    font,
    size,
    stroke: () => colour("ink-2"),
    grid: { stroke: () => colour("line"), width: 1 },
    ticks: { stroke: () => colour("line"), width: 1, size: 4 },
  };
}

function asSeries({ label, hue, kind, width = 2, dash }) {
  const stroke = () => colour(hue);
  if (kind === "points" || kind === "spots") {
    // A ring and a dot: they differ in more than colour, and a dot inside a ring is visible.
    const ring = kind === "points";
    const points = {
      show: true,
      size: ring ? 13 : 7,
      width: ring ? 3 : 1,
      stroke,
      fill: ring ? "transparent" : stroke,
    };
    return { label, stroke, paths: () => null, points };
  }
  const paths = kind === "steps" ? uPlot.paths.stepped({ align: -1 }) : uPlot.paths.linear();
  return { label, stroke, width, dash, paths, spanGaps: true, points: { show: false } };
}
