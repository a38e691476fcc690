/* One race: the same request with a drafter and with plain decoding, one after the other.

   A runner is one of these: its trace (a Run of trace.js), text, token ids and clock. The clock is the trace's: from
   the end of the prompt's pass to the end of the last pass, on the server. Nothing is estimated. */

import { stream } from "./live-api.js";
import { Run } from "./trace.js";

export class Runner {
  constructor(name, plain = false) {
    this.name = name;
    this.plain = plain;
    this.state = "waiting"; // running, done, stopped, failed
    this.run = new Run();
    this.lines = []; // of the trace
    this.text = "";
    this.ids = [];
    this.finish = "";
  }

  add(chunk) {
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

  /** Microseconds from the end of the prompt's pass to the end of the latest one; null before the second pass. */
  get clock() {
    return this.run.race()?.ownEnd ?? null;
  }

  /** Tokens per second in that time; the first token belongs to the prompt's pass. */
  get speed() {
    return this.clock ? ((this.ids.length - 1) * 1e6) / this.clock : null;
  }

  /** Every pass of a plain run, as a trace's footer keeps it. */
  get passes() {
    return this.run.steps.map((step) => step.us.verify ?? null);
  }

  /** Add the plain run of the same request to this trace's footer, so that the trace alone shows the race. */
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

/** Whether two token sequences are equal; `upTo`: length of their common prefix. */
export function same(one, other) {
  let upTo = 0;
  while (upTo < one.ids.length && upTo < other.ids.length && one.ids[upTo] === other.ids[upTo]) upTo++;
  return { identical: upTo === one.ids.length && upTo === other.ids.length && upTo > 0, upTo };
}

/** Speedup over the plain run by the clock; null unless the tokens are the same. */
export function speedup(runner, plain) {
  return runner.clock && plain?.clock && same(runner, plain).identical ? plain.clock / runner.clock : null;
}

/** Run them one after the other, so that none slows another; `changed(runner)` is called after every step. */
export async function race(runners, { path, body, level }, { key, signal, changed }) {
  for (const runner of runners) {
    runner.state = "running";
    changed(runner);
    const onchunk = (chunk) => (runner.add(chunk), changed(runner));
    try {
      await stream(path, { ...body, speculation: speculation(runner, level) }, { key, signal, onchunk });
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

function speculation(runner, level) {
  return runner.plain ? { enabled: false, trace: "summary" } : { drafter: runner.name, trace: level };
}

/** The request of both runners. `learn: false`: a drafter with memory would otherwise know the answer next time. */
export function request({ prompt, raw, temperature, seed, tokens, level }, messages) {
  const input = raw ? { prompt } : { messages };
  const body = { ...input, temperature, seed, max_tokens: tokens, stream: true, return_token_ids: true, learn: false };
  return { path: raw ? "v1/completions" : "v1/chat/completions", body, level };
}
