/* Picks the steps of a run that Explain shows. */

/** The node at which the walk through a draft ended: rejected, and no other token of its depth was accepted. */
export const missOf = (step) => step.nodes.find((node) => node.fate === "r" && node.depth === step.accepted) ?? null;

/** A step with several accepted tokens and a later one with a miss; null without both, or without their clock. */
export function exampleSteps(run) {
  if (!run?.race()) return null;
  const drafted = run.steps.slice(1).filter((step) => step.nodes.length && step.us.draft);
  // A short chain is the clearest; words explain more than punctuation; a draft should be seen at the scale of its pass.
  const long = (step) =>
    2 * Math.max(0, step.nodes.length - 6) + 4 * step.nodes.some((node, i) => node.parent !== i - 1);
  const wordlike = (step) => step.nodes.filter((node) => /\w/.test(run.piece(node.token))).length / 2;
  const timed = (step) => 8 * Math.min(0.25, step.us.draft[1] / step.us.verify[1]);
  const unreached = (step) => step.nodes.some((node) => node.fate === "u");
  const accept = best(
    drafted.filter((step) => step.accepted >= 2),
    (step) => step.emitted.length + wordlike(step) + timed(step) - long(step),
  );
  const missed = drafted.filter((step) => missOf(step) && step.emitted.length > step.accepted && step !== accept);
  const later = missed.filter((step) => step.index > accept?.index);
  const reject = best(
    later.length ? later : missed,
    (step) => 4 * Math.min(step.accepted, 1) + 3 * unreached(step) + wordlike(step) + timed(step) - long(step),
  );
  return accept && reject ? { accept, reject } : null;
}

const best = (steps, score) =>
  steps.reduce((top, step) => (top === null || score(step) > score(top) ? step : top), null);
