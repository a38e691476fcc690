/* Reads, checks and counts a trace. It knows the file's format and nothing about drawing.

   run = parseTrace(text)      a whole file, or a TraceError with a message for the user
   run = new Run(); run.push(line); …      the same, line by line
   run.steps                   one sequence's steps, in order; run.select(id) changes the sequence
   run.piece(id)               a token's text; run.textOf(step): the text of each emitted token
   run.prompt                  what the user asked

   A trace is untrusted input: shapes are checked here, once, and what is too large to show is refused. A missing or
   malformed number is null, and is shown as "not recorded". */

export class TraceError extends Error {}

export const LIMITS = {
  version: 1,
  characters: 64e6,
  steps: 50_000,
  nodes: 4_096, // of one step
  allNodes: 1_000_000,
  emitted: 4_096, // of one step
  pieces: 300_000,
  pieceLength: 400,
  sequences: 256,
};
// ChatML (SmolLM, Qwen), Llama 3, Llama 2 and Mistral
const USER_TURN =
  /<\|im_start\|>user\n([^]*?)<\|im_end\|>|<\|start_header_id\|>user<\|end_header_id\|>\s*([^]*?)<\|eot_id\|>|\[INST\]([^]*?)\[\/INST\]/g;
const FATES = new Set(["a", "r", "u", "p"]);

export class Run {
  constructor(title = "") {
    this.title = title;
    this.header = null;
    this.footer = null;
    this.version = 0; // grows with every change, so that views know when to redraw
    this.pieces = new Map();
    this.bySequence = new Map();
    this.nodeCount = 0;
    this.stepCount = 0;
    this.seq = null;
    this.counts = emptyCounts();
  }

  /* ------------------------------------------------------------ input */

  push(line) {
    if (!isObject(line)) throw new TraceError("A line of the trace is not a JSON object.");
    this.version++;
    if (line.pieces !== undefined) this.#addPieces(line.pieces);
    if ("outrider_trace" in line) this.#header(line);
    else if (line.end) this.footer = { ...line, drafting: isObject(line.drafting) ? line.drafting : null };
    else this.#step(line);
  }

  #header(line) {
    if (line.outrider_trace !== LIMITS.version)
      throw new TraceError(
        `The trace has version ${short(line.outrider_trace)}, but this page reads version ${LIMITS.version}.`,
      );
    this.header = line;
  }

  #step(line) {
    if (this.stepCount >= LIMITS.steps)
      throw new TraceError(
        `The trace has more than ${LIMITS.steps.toLocaleString("en")} steps; this page shows no more than that.`,
      );
    const step = readStep(line, this.stepCount + 1);
    this.nodeCount += step.nodes.length;
    if (this.nodeCount > LIMITS.allNodes)
      throw new TraceError(
        `The trace has more than ${LIMITS.allNodes.toLocaleString("en")} drafted nodes; this page shows no more than that.`,
      );
    let steps = this.bySequence.get(step.seq);
    if (!steps) {
      if (this.bySequence.size >= LIMITS.sequences)
        throw new TraceError(
          `The trace has more than ${LIMITS.sequences} sequences; this page shows no more than that.`,
        );
      this.bySequence.set(step.seq, (steps = []));
      if (this.seq === null) this.seq = step.seq;
    }
    const last = steps[steps.length - 1];
    step.index = steps.length;
    step.tokensBefore = last ? last.tokensBefore + last.emitted.length : 0;
    steps.push(step);
    this.stepCount++;
    if (step.seq === this.seq) count(this.counts, step);
  }

  #addPieces(pieces) {
    if (!isObject(pieces)) return;
    for (const [id, text] of Object.entries(pieces)) {
      if (this.pieces.size >= LIMITS.pieces) return;
      if (typeof text === "string" && /^\d{1,9}$/.test(id))
        this.pieces.set(Number(id), text.slice(0, LIMITS.pieceLength));
    }
  }

  /* ------------------------------------------------------------ contents */

  get steps() {
    return this.bySequence.get(this.seq) ?? [];
  }

  get sequences() {
    return [...this.bySequence.keys()];
  }

  select(seq) {
    if (!this.bySequence.has(seq)) return;
    this.seq = seq;
    this.counts = emptyCounts();
    for (const step of this.steps) count(this.counts, step);
    this.version++;
  }

  /** The user's last message, without the chat template around it; the whole prompt where no template is known. */
  get prompt() {
    const text = clip(this.header?.prompt_text, 20_000);
    const turns = [...text.matchAll(USER_TURN)].map((match) => match.slice(1).find((part) => part !== undefined));
    return (turns.at(-1) ?? text).trim();
  }

  get temperature() {
    return number(this.header?.temperature);
  }

  /** A token's text; #id where the trace does not have it. */
  piece(id) {
    return this.pieces.get(id) ?? `#${id}`;
  }

  /** The text of each emitted token of a step: as recorded, else the tokens' pieces. */
  textOf(step) {
    if (step.texts) return step.texts;
    const raw = this.sequences.length === 1 && Array.isArray(this.footer?.texts) ? this.footer.texts : null;
    return step.emitted.map((id, i) => {
      const text = raw?.[step.tokensBefore + i];
      return typeof text === "string" ? text.slice(0, LIMITS.pieceLength) : (this.pieces.get(id) ?? ` #${id}`);
    });
  }

  get text() {
    return this.steps.map((step) => this.textOf(step).join("")).join("");
  }

  /* ------------------------------------------------------------ statistics, counted as in the terminal */

  /** Emitted tokens per pass with a verdict, bonus included. */
  tau() {
    return ratio(this.counts.emitted, this.counts.steps);
  }

  /** Accepted ÷ reached. */
  alpha() {
    return ratio(this.counts.accepted, this.counts.reached);
  }

  /** α at each depth, given that it was reached. */
  alphaByPosition() {
    return this.counts.reachedAt.map((reached, i) => ({
      reached,
      accepted: this.counts.acceptedAt[i],
      alpha: this.counts.acceptedAt[i] / reached,
    }));
  }

  /** Counts by drafter, those with most drafts first. */
  bySource() {
    const sources = new Map();
    for (const step of this.steps) {
      if (!step.nodes.length) continue;
      if (!sources.has(step.source)) sources.set(step.source, emptyCounts());
      count(sources.get(step.source), step);
    }
    return [...sources]
      .map(([source, counts]) => ({ source, ...counts, alpha: ratio(counts.accepted, counts.reached) }))
      .sort((a, b) => b.drafts - a.drafts);
  }

  /** Drafted tokens per draft. */
  meanK() {
    return ratio(this.counts.drafted, this.counts.drafts);
  }

  /** End times of this run's and the plain run's passes, each from the end of its prompt pass. null: not recorded. */
  race() {
    if (this.raced?.version !== this.version) this.raced = { version: this.version, race: this.#race() };
    return this.raced.race;
  }

  #race() {
    const steps = this.steps;
    if (steps.length < 2 || steps.some((step) => !step.us.verify)) return null;
    const zero = steps[0].us.verify[0] + steps[0].us.verify[1];
    const own = steps.map(({ us, nodes, tokensBefore, emitted }) => ({
      start: us.verify[0] - zero,
      at: us.verify[0] + us.verify[1] - zero,
      draft: us.draft && nodes.length ? [us.draft[0] - zero, us.draft[0] + us.draft[1] - zero] : null,
      tokens: tokensBefore + emitted.length,
    }));
    return { own, plain: this.#plain(), ownEnd: own[own.length - 1].at, tokens: own[own.length - 1].tokens };
  }

  #plain() {
    const raw = this.footer?.plain;
    if (!isObject(raw) || !Array.isArray(raw.us) || raw.us.length < 2 || raw.us.length > LIMITS.steps) return null;
    const spans = raw.us.map(span);
    if (spans.some((each) => !each)) return null;
    const zero = spans[0][0] + spans[0][1];
    const passes = spans.map(([start, lasted], i) => ({
      start: start - zero,
      at: start + lasted - zero,
      lasted,
      tokens: i + 1,
    }));
    return {
      same: raw.same === true ? true : raw.same === false ? false : null,
      passes,
      end: passes[passes.length - 1].at,
      pass: median(passes.slice(1).map((pass) => pass.lasted)),
    };
  }

  /** Wall-clock speedup over the plain run; null if that is not recorded. */
  speedup() {
    const race = this.race();
    return race?.plain && race.ownEnd > 0 ? race.plain.end / race.ownEnd : null;
  }

  /** c: time to draft one token, in plain passes. */
  draftCost() {
    const plain = this.race()?.plain;
    const drafts = this.steps.filter((step) => step.nodes.length && step.us.draft);
    const tokens = drafts.reduce((sum, step) => sum + step.nodes.length, 0);
    const micros = drafts.reduce((sum, step) => sum + step.us.draft[1], 0);
    return plain && tokens && plain.pass ? micros / tokens / plain.pass : null;
  }

  /** Time of a pass that verifies a draft, in plain passes. */
  passCost() {
    const plain = this.race()?.plain;
    const passes = this.steps.slice(1).filter((step) => step.nodes.length && step.us.verify);
    return plain?.pass && passes.length ? median(passes.map((step) => step.us.verify[1])) / plain.pass : null;
  }
}

export function parseTrace(text, title = "") {
  if (text.length > LIMITS.characters)
    throw new TraceError(
      `The file has ${Math.round(text.length / 1e6)} million characters; this page reads at most ${LIMITS.characters / 1e6} million.`,
    );
  const run = new Run(title);
  const lines = text.split("\n").filter((line) => line.trim());
  lines.forEach((line, i) => {
    let parsed;
    try {
      parsed = JSON.parse(line);
    } catch {
      if (i > 0 && i === lines.length - 1) return; // the run ended while writing this line
      throw new TraceError(
        i === 0
          ? "This is not an Outrider trace: its first line is not JSON."
          : `Line ${i + 1} of the trace is not JSON.`,
      );
    }
    if (i === 0 && !(isObject(parsed) && "outrider_trace" in parsed))
      throw new TraceError("This is not an Outrider trace: its first line has no “outrider_trace”.");
    run.push(parsed);
  });
  if (!run.header) throw new TraceError("The file is empty: there is no trace in it.");
  if (!run.stepCount) throw new TraceError("The trace has a header but no step: there is nothing to show yet.");
  return run;
}

/* ---------------------------------------------------------------- one line */

function readStep(line, ordinal) {
  const where = `Step ${ordinal} of the trace`;
  if (!Array.isArray(line.nodes)) throw new TraceError(`${where} has no list of nodes.`);
  if (line.nodes.length > LIMITS.nodes)
    throw new TraceError(
      `${where} has ${line.nodes.length.toLocaleString("en")} nodes; this page draws at most ${LIMITS.nodes.toLocaleString("en")} of one step.`,
    );
  if (!Array.isArray(line.emitted) || line.emitted.length > LIMITS.emitted || !line.emitted.every(isToken))
    throw new TraceError(`${where} does not say which tokens were emitted.`);
  const nodes = [];
  for (const raw of line.nodes) nodes.push(readNode(raw, nodes, where));
  return {
    step: number(line.step) ?? ordinal,
    seq: number(line.seq) ?? 0,
    at: number(line.at),
    source: clip(line.source, 80),
    budget: number(line.budget),
    why: clip(line.why, 400),
    failure: clip(line.failure, 400),
    finish: clip(line.finish, 40),
    us: readClock(line.us),
    nodes,
    accepted: nodes.reduce((sum, node) => sum + (node.fate === "a"), 0),
    emitted: line.emitted,
    texts:
      Array.isArray(line.texts) && line.texts.length === line.emitted.length
        ? line.texts.map((text) => clip(text, LIMITS.pieceLength))
        : null,
    chose: Array.isArray(line.chose) ? line.chose.slice(0, line.emitted.length).map(readChoice) : null,
    noise: Array.isArray(line.noise) ? line.noise.map((each) => (isObject(each) ? each : {})) : null,
    guesses: isObject(line.guesses) ? line.guesses : null,
  };
}

function readNode(raw, before, where) {
  if (!Array.isArray(raw)) throw new TraceError(`${where} has a node that is not a list.`);
  const [token, parent, q, p, fate] = raw;
  if (!isToken(token)) throw new TraceError(`${where} has a node without a token.`);
  if (!Number.isInteger(parent) || parent < -1 || parent >= before.length)
    throw new TraceError(`${where} has a node whose parent does not come before it.`);
  if (!FATES.has(fate)) throw new TraceError(`${where} has a node whose fate is unknown: ${short(fate)}.`);
  const depth = parent < 0 ? 0 : before[parent].depth + 1;
  return { token, parent, q: probability(q), p: probability(p), fate, depth };
}

function readChoice(raw) {
  if (!Array.isArray(raw) || !isToken(raw[0])) return null;
  const [token, p, margin, top] = raw;
  return { token, p: probability(p), margin: number(margin), top: ranking(top) };
}

/** Up to five [token, probability] pairs; malformed ones are left out. */
export function ranking(top) {
  if (!Array.isArray(top)) return [];
  return top
    .slice(0, 5)
    .filter((pair) => Array.isArray(pair) && isToken(pair[0]))
    .map(([token, p]) => ({ token, p: probability(p) }));
}

function readClock(us) {
  const clock = {};
  if (isObject(us))
    for (const phase of ["draft", "verify", "overlap", "judge", "host"]) {
      const read = span(us[phase]);
      if (read) clock[phase] = read;
    }
  return clock;
}

function span(raw) {
  const valid = Array.isArray(raw) && raw.slice(0, 2).every((n) => number(n) !== null && n >= 0 && n < 1e14);
  return valid && raw.length >= 2 ? [raw[0], raw[1]] : null;
}

/* ---------------------------------------------------------------- counting */

function emptyCounts() {
  return { steps: 0, drafts: 0, drafted: 0, reached: 0, accepted: 0, emitted: 0, reachedAt: [], acceptedAt: [] };
}

/** As Stats.count: one node per depth is reached, the accepted one or the step's first rejection. */
function count(counts, step) {
  counts.steps++;
  counts.drafts += step.nodes.length > 0;
  counts.drafted += step.nodes.length;
  counts.accepted += step.accepted;
  counts.emitted += step.emitted.length;
  const reached = step.accepted + step.nodes.some((node) => node.fate === "r");
  counts.reached += reached;
  for (let depth = 0; depth < reached; depth++) {
    counts.reachedAt[depth] = (counts.reachedAt[depth] ?? 0) + 1;
    counts.acceptedAt[depth] = (counts.acceptedAt[depth] ?? 0) + (depth < step.accepted);
  }
}

/* ---------------------------------------------------------------- values */

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
const isToken = (value) => Number.isInteger(value) && value >= 0 && value < 2 ** 31;
const number = (value) => (typeof value === "number" && Number.isFinite(value) ? value : null);
const probability = (value) => (number(value) !== null && value >= 0 && value <= 1.0001 ? value : null);
const clip = (value, most) => (typeof value === "string" ? value.slice(0, most) : "");
const short = (value) => clip(String(value), 40);
const ratio = (part, whole) => (whole ? part / whole : null);

/** The index of the last pass that had ended at this moment. */
export function passAt(passes, moment) {
  let low = 0,
    high = passes.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (passes[middle].at <= moment) low = middle;
    else high = middle - 1;
  }
  return low;
}

export function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length ? (sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2) : null;
}
