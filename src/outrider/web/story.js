/* The ten seconds of the stage: which moment of the run it shows, and how much of it. It draws nothing.

   Six stations, each a part of the ten seconds. A frame is {t, left, width}: the moment in microseconds after the
   prompt's pass, and the window of time around it. Between two keys everything moves evenly, or, where the window
   moves, smoothly; the scale is always the same for all that is in the window. */

export const SECONDS = 10;
export const STARTS = [0, 1.6, 3.4, 5, 6.2, 8]; // of the stations: Baseline, Draft, Verify, Accept, Reject, Speedup

export const endOf = (station) => STARTS[station + 1] ?? SECONDS;

/** The station at this second; a station's last moment belongs to it. */
export const stationAt = (second) =>
  Math.max(
    0,
    STARTS.findLastIndex((start) => start < second),
  );

/** frame(second) of a run with these example steps. */
export function makeStory(run, { accept, reject }) {
  const race = run.race();
  const zero = run.steps[0].us.verify[0] + run.steps[0].us.verify[1];
  const first = (race.plain?.passes ?? race.own).slice(0, 5).at(-1).at;
  const end = Math.max(race.ownEnd, race.plain?.end ?? 0);
  const baseline = window(0, first, 0.04);
  const [a, r] = [accept, reject].map((step) => {
    const start = step.us.draft[0] - zero,
      stop = step.us.verify[0] + step.us.verify[1] - zero;
    return {
      start,
      drafted: start + step.us.draft[1],
      stop,
      after: stop + 0.06 * (stop - start),
      ...window(start, stop, 0.07),
    };
  });
  const whole = window(0, end, 0.02);
  const keys = [
    { at: 0, t: 0, ...baseline },
    { at: 1.6, t: first, ...baseline },
    { at: 2.2, t: a.start, ...a, smooth: true },
    { at: 3.4, t: a.drafted, ...a },
    { at: 5, t: a.stop, ...a },
    { at: 6.2, t: a.after, ...a },
    { at: 6.8, t: r.start, ...r, smooth: true },
    { at: 7.6, t: r.stop, ...r },
    { at: 8, t: r.after, ...r },
    { at: 8.6, t: r.after, ...whole, smooth: true },
    { at: 9.8, t: end, ...whole },
    { at: SECONDS, t: end, ...whole },
  ];
  return (second) => between(keys, Math.min(SECONDS, Math.max(0, second)));
}

const window = (from, to, margin) => ({ left: from - margin * (to - from), width: (1 + 2 * margin) * (to - from) });

/** The window's width changes by a factor, and the moment keeps its way across it: it never leaves the window. */
function between(keys, second) {
  const i = Math.max(
      1,
      keys.findIndex((key) => key.at >= second),
    ),
    [from, to] = [keys[i - 1], keys[i]];
  const even = (second - from.at) / (to.at - from.at),
    share = to.smooth ? even * even * (3 - 2 * even) : even;
  const mix = (one, other) => one + (other - one) * share;
  const place = (key) => (key.t - key.left) / key.width;
  const t = mix(from.t, to.t),
    width = Math.exp(mix(Math.log(from.width), Math.log(to.width)));
  return { t, width, left: t - mix(place(from), place(to)) * width };
}
