/** The window of the timeline in which a rollout can be seen. */

export interface Window {
  from: number;
  to: number;
}

/** A call that takes less than this part of a window is too narrow to be seen and pressed. */
const VISIBLE = 1 / 250;

/**
 * Return the window around all calls of a rollout; around the longest of them, if it would be too
 * narrow in that one. null without calls.
 */
export function momentOf(starts_s: readonly number[], durations_s: readonly number[]): Window | null {
  let longest = 0;
  let end = -Infinity;
  starts_s.forEach((start, at) => {
    end = Math.max(end, start + (durations_s[at] ?? 0));
    if ((durations_s[at] ?? 0) > (durations_s[longest] ?? 0)) longest = at;
  });
  if (!starts_s.length) return null;
  const whole = around(Math.min(...starts_s), end);
  const duration_s = durations_s[longest] ?? 0;
  if (duration_s >= (whole.to - whole.from) * VISIBLE) return whole;
  const start = starts_s[longest] ?? 0;
  return around(start - duration_s * 10, start + duration_s * 11);
}

function around(from: number, to: number): Window {
  const room = Math.max((to - from) * 0.3, 0.002);
  return { from: from - room, to: to + room };
}
