/* One race: the same request to one drafter, perhaps to a second, and to plain decoding, one after the other.

   A runner is one contestant: its trace as it comes (a Run of trace.js), its text, its token ids, its clock. The clock is
   the trace's own: from the end of the pass over the prompt to the end of the last pass, on the server. Nothing is
   estimated: what has not been measured yet is not shown. It knows numbers; live.js shows them. */

import { stream } from "./live-ask.js";
import { Run } from "./trace.js";

export class Runner {
  constructor(name, plain = false) {
    this.name = name;
    this.plain = plain;
    this.state = "waiting"; // running, done, stopped, failed
    this.run = new Run();
    this.lines = []; // the trace's, as they came
    this.text = "";
    this.ids = [];
    this.finish = "";
  }

  take(chunk) {
    const choice = chunk.choices?.[0];
    if (!choice) return;
    this.text += choice.delta?.content ?? choice.text ?? "";
    this.ids.push(...(choice.token_ids ?? []));
    this.finish = choice.finish_reason ?? this.finish;
    for (const line of chunk.trace ?? []) {
      this.lines.push(line);
      this.run.push(line);
    }
  }

  get alpha() {
    return this.run.alpha();
  }

  get tau() {
    return this.run.tau();
  }

  /** Microseconds from the end of the prompt's pass to the end of the latest one; null before there are two. */
  get clock() {
    return this.run.race()?.ownEnd ?? null;
  }

  /** Tokens per second of that time: the first token is the prompt's pass's. */
  get speed() {
    return this.clock ? ((this.ids.length - 1) * 1e6) / this.clock : null;
  }

  /** Every pass of a plain run, as a trace's footer keeps it. */
  get passes() {
    return this.run.steps.map((step) => step.us.verify ?? null);
  }

  /** The plain run of the same request belongs to this one's record: the race can then be drawn from it alone. */
  keepPlain(plain) {
    if (!same(this, plain).identical || plain.passes.some((pass) => pass === null)) return;
    const footer = { ...(this.lines.at(-1)?.end ? this.lines.pop() : { end: true }), plain: { us: plain.passes } };
    this.lines.push(footer);
    this.run.push(footer);
  }

  get jsonl() {
    return this.lines.map((line) => `${JSON.stringify(line)}\n`).join("");
  }
}

/** Are two answers the same, id by id? `upTo`: how many ids they share from the start. */
export function same(one, other) {
  let upTo = 0;
  while (upTo < one.ids.length && upTo < other.ids.length && one.ids[upTo] === other.ids[upTo]) upTo++;
  return { identical: upTo === one.ids.length && upTo === other.ids.length && upTo > 0, upTo };
}

/** How many times faster than the plain run, clock against clock over the same tokens; null where there is no such. */
export function speedup(runner, plain) {
  return runner.clock && plain?.clock && same(runner, plain).identical ? plain.clock / runner.clock : null;
}

/** Run them one after the other, so that none slows another; `changed(runner)` after every step of each. */
export async function race(runners, wish, { key, signal, changed }) {
  for (const runner of runners) {
    runner.state = "running";
    changed(runner);
    const tell = (chunk) => (runner.take(chunk), changed(runner));
    try {
      await stream(wish.path, { ...wish.body, speculation: speculation(runner, wish) }, { key, signal, tell });
    } catch (error) {
      runner.state = error.name === "AbortError" ? "stopped" : "failed";
      changed(runner);
      throw error;
    }
    runner.state = "done";
    changed(runner);
  }
  const plain = runners.find((runner) => runner.plain);
  for (const runner of runners) if (!runner.plain && plain) runner.keepPlain(plain);
}

function speculation(runner, wish) {
  return runner.plain ? { enabled: false, trace: "summary" } : { drafter: runner.name, trace: wish.level };
}

/** The request that all of them get. Nobody learns from it: a drafter that remembers would know the answer next time. */
export function request({ prompt, raw, temperature, seed, tokens, level }) {
  const said = raw ? { prompt } : { messages: [{ role: "user", content: prompt }] };
  const body = { ...said, temperature, seed, max_tokens: tokens, stream: true, return_token_ids: true, learn: false };
  return { path: raw ? "v1/completions" : "v1/chat/completions", body, level };
}
