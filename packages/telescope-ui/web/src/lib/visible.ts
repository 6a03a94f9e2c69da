/** Text of models as text: what has no shape of its own is shown by a sign. */

import { options, type ComponentChildren, type VNode } from "preact";

// Control characters but tab and line end, and what turns or hides text around it. Joiners (U+200C, U+200D) are
// letters' own in Persian, Hindi and emoji, and are signs only in tokens.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g;

function sign(character: string): string {
  return `<U+${character.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}>`;
}

export function visible(text: string): string {
  return text.replace(HIDDEN, sign);
}

function visibleIn(children: ComponentChildren): ComponentChildren {
  if (typeof children === "string") return visible(children);
  return Array.isArray(children) ? children.map(visibleIn) : children;
}

/** Attributes that are read by people. */
const READ = ["title", "aria-label"];

/** Pass every text and title through `visible` where an element is made, so that no name of a user is forgotten. */
export function showHidden(): void {
  const before = options.vnode;
  options.vnode = (vnode: VNode) => {
    if (typeof vnode.type === "string") {
      const props = vnode.props as Record<string, unknown> & { children?: ComponentChildren };
      const { children } = props;
      // The value of an option is its text unless it has one.
      if (vnode.type === "option" && typeof children === "string") props["value"] ??= children;
      if (children !== undefined) props.children = visibleIn(children);
      for (const name of READ) if (typeof props[name] === "string") props[name] = visible(props[name]);
    }
    before?.(vnode);
  };
}

/** A token: line ends and tabs are shown too, as they are what it is. */
export function visibleToken(text: string): string {
  return visible(text).replace(/[\u200c\u200d]/g, sign).replace(/\n/g, "\u23ce\n").replace(/\t/g, "\u21e5\t");
}

export function shortened(text: string, length: number): string {
  return text.length > length ? `${text.slice(0, length - 1)}\u2026` : text;
}
