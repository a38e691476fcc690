/* Which steps of a run are worth looking at first. It knows runs (trace.js), and no pixels. */

/** A step that keeps several tokens and one that loses some: the clearest chains of a run; null where there are none. */
export function telling(run) {
  const chains = (run?.steps ?? [])
    .slice(1)
    .filter((step) => step.nodes.length && step.nodes.every((node, i) => node.parent === i - 1));
  const long = (step) => 2 * Math.max(0, step.nodes.length - 6); // a long one does not fit
  const words = (step) => step.nodes.filter((node) => /\w/.test(run.piece(node.token))).length / 2; // words say more than signs
  const lost = (step) => step.nodes.filter((node) => node.fate === "u").length;
  const accept = best(
    chains.filter((step) => step.accepted >= 2),
    (step) => step.emitted.length + words(step) - long(step),
  );
  const reject = best(
    chains.filter((step) => step.nodes.some((node) => node.fate === "r")),
    (step) => 4 * Math.min(step.accepted, 1) + 3 * Math.min(lost(step), 1) + words(step) - long(step),
  );
  return accept && reject ? { accept, reject } : null;
}

/** Where a finished run is opened: at a step with something to see. */
export function firstLook(run) {
  const full = best(
    run.steps.filter((step) => step.nodes.length > 1),
    (step) => Math.min(step.accepted, 3) + (step.accepted < step.nodes.length),
  );
  return (telling(run)?.reject ?? full ?? run.steps[run.steps.length - 1])?.index ?? -1;
}

const best = (steps, score) =>
  steps.reduce((top, step) => (top === null || score(step) > score(top) ? step : top), null);
