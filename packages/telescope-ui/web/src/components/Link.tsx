import type { ComponentChildren } from "preact";
import { isThere } from "../lib/data.ts";
import { href } from "../lib/router.ts";

interface Props {
  to: string;
  class?: string;
  title?: string;
  current?: boolean;
  children: ComponentChildren;
}

/** A link; plain text where an export has no such page. */
export function Link({ to, current, children, ...rest }: Props) {
  if (!isThere(to)) return <span {...rest}>{children}</span>;
  return (
    <a href={href(to)} aria-current={current ? "page" : undefined} {...rest}>
      {children}
    </a>
  );
}
