/* Canvases in the page's colours and units. */

import { colour } from "./dom.js";

/** A canvas with its size in CSS pixels, cleared. */
export function prepare(canvas, width, height) {
  const scale = devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = `12px ${colour("mono")}`;
  pen.textBaseline = "middle";
  return pen;
}

/** Round moments for the labels of a time axis: at most one for every 110 pixels. */
export function ticksOf(from, span, width) {
  const raw = span / Math.max(2, Math.floor(width / 110)),
    power = 10 ** Math.floor(Math.log10(raw)),
    tick = [1, 2, 5, 10].map((m) => m * power).find((each) => each >= raw),
    first = Math.max(0, Math.ceil(from / tick));
  return Array.from(
    { length: Math.max(0, Math.floor((from + span) / tick) - first + 1) },
    (_, i) => (first + i) * tick,
  );
}
