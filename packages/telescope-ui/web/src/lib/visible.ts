/** Text of models as text: what has no shape of its own is shown by a sign. */

// Control characters but tab and line end, and what turns or hides text around it. Joiners (U+200C, U+200D) are
// letters' own in Persian, Hindi and emoji, and are signs only in tokens.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g;

function sign(character: string): string {
  return `<U+${character.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}>`;
}

export function visible(text: string): string {
  return text.replace(HIDDEN, sign);
}

/** A token: line ends and tabs are shown too, as they are what it is. */
export function visibleToken(text: string): string {
  return visible(text).replace(/[\u200c\u200d]/g, sign).replace(/\n/g, "\u23ce\n").replace(/\t/g, "\u21e5\t");
}

export function shortened(text: string, length: number): string {
  return text.length > length ? `${text.slice(0, length - 1)}\u2026` : text;
}
