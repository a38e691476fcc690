/* Picks the steps of a run that are shown first. */

/** The clearest chains of a run: one with several accepted tokens, one with a rejection; null without both. */
export function exampleSteps(run) {
  const chains = (run?.steps ?? [])
    .slice(1)
    .filter((step) => step.nodes.length && step.nodes.every((node, i) => node.parent === i - 1));
  const long = (step) => 2 * Math.max(0, step.nodes.length - 6); // a long one does not fit on the screen
  const wordlike = (step) => step.nodes.filter((node) => /\w/.test(run.piece(node.token))).length / 2; // words explain more than punctuation
  const unreached = (step) => step.nodes.filter((node) => node.fate === "u").length;
  const accept = best(
    chains.filter((step) => step.accepted >= 2),
    (step) => step.emitted.length + wordlike(step) - long(step),
  );
  const reject = best(
    chains.filter((step) => step.nodes.some((node) => node.fate === "r")),
    (step) => 4 * Math.min(step.accepted, 1) + 3 * Math.min(unreached(step), 1) + wordlike(step) - long(step),
  );
  return accept && reject ? { accept, reject } : null;
}

/** The step at which a finished run is opened. */
export function firstLook(run) {
  const full = best(
    run.steps.filter((step) => step.nodes.length > 1),
    (step) => Math.min(step.accepted, 3) + (step.accepted < step.nodes.length),
  );
  return (exampleSteps(run)?.reject ?? full ?? run.steps[run.steps.length - 1])?.index ?? -1;
}

const best = (steps, score) =>
  steps.reduce((top, step) => (top === null || score(step) > score(top) ? step : top), null);
