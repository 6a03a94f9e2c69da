/** Messages: roles, thoughts, tool calls and their results. Nothing is ever read as HTML. */

import type { ComponentChildren } from "preact";
import { withQuery } from "../lib/address.ts";
import { plural } from "../lib/format.ts";
import { go } from "../lib/router.ts";
import type { Message, Picture, RolloutPage, ToolCall } from "../lib/types.ts";
import { visible } from "../lib/visible.ts";
import { Rendered } from "./Rendered.tsx";

/** What a message says as one text; parts that are no text are named. */
export function contentText(content: unknown): string {
  if (content === null || content === undefined) return "";
  if (typeof content === "string") return content;
  if (!Array.isArray(content)) return JSON.stringify(content, null, 1);
  return content
    .map((part: unknown) => {
      if (typeof part === "string") return part;
      const fields = (part ?? {}) as Record<string, unknown>;
      if (typeof fields["text"] === "string") return fields["text"];
      return `[${String(fields["type"] ?? "part")}]`;
    })
    .join("");
}

export function callText(call: ToolCall): string {
  const given = call.function?.arguments;
  return typeof given === "string" ? given : JSON.stringify(given ?? {}, null, 1);
}

/** All that a message says: thoughts, text and calls. */
export function saidIn(message: Message): string {
  const calls = (message.tool_calls ?? []).map((call) => `\n${call.function?.name ?? "?"} ${callText(call)}`);
  const thought = message.reasoning ? `${message.reasoning}\n\n` : "";
  return thought + contentText(message.content) + calls.join("");
}

/** Kinds that a browser only draws; anything else is named, and not handed to it. */
const DRAWN = ["image/png", "image/jpeg", "image/gif", "image/webp"];

function Pictures({ images }: { images: Picture[] }) {
  return (
    <p class="pictures">
      {images.map((image, number) =>
        DRAWN.includes(image.media_type) ? (
          <img
            key={number}
            alt={`Picture ${number + 1} of the message, behind character ${image.at}`}
            src={`data:${image.media_type};base64,${image.data}`}
          />
        ) : (
          <span key={number}>[{visible(image.media_type)}]</span>
        ),
      )}
    </p>
  );
}

/** Whether texts are shown as they are written, which is in the address, and a way to change that. */
export function RawSwitch({ address, isRaw }: { address: string; isRaw: boolean }) {
  return (
    <label class="check">
      <input type="checkbox" checked={isRaw} onChange={() => go(withQuery(address, { "ui.raw": isRaw ? null : "yes" }), "replace")} />
      raw text
    </label>
  );
}

/** What the model was offered. */
export function Tools({ tools }: { tools: RolloutPage["tools"] }) {
  if (!tools.length) return null;
  return (
    <details>
      <summary>The model was offered {plural(tools.length, "tool")}</summary>
      {tools.map((tool, at) => (
        <details key={at}>
          <summary>
            <code>{visible(tool.function?.name ?? "?")}</code>
          </summary>
          <p class="note lines">{visible(tool.function?.description ?? "")}</p>
          <pre>{visible(JSON.stringify(tool.function?.parameters ?? tool, null, 2))}</pre>
        </details>
      ))}
    </details>
  );
}

interface Props {
  messages: Message[];
  /** Texts are shown as they are written. */
  isRaw: boolean;
  /** What stands below a message, by its position. */
  below?: (at: number) => ComponentChildren;
}

export function Conversation({ messages, isRaw, below }: Props) {
  return (
    <div class="conversation">
      {messages.map((message, at) => (
        <div key={at} class={`message message-${message.role}`} role="group" aria-label={`${message.role}, message ${at + 1}`}>
          <div class="role">
            {message.role}
            {message.tool_call_id ? ` \u2190 ${message.tool_call_id}` : ""}
          </div>
          {message.reasoning && (
            <details class="reasoning">
              <summary>Reasoning, {message.reasoning.length.toLocaleString("en-US")} characters</summary>
              <Rendered text={message.reasoning} isRaw={isRaw} />
            </details>
          )}
          {contentText(message.content) && <Rendered text={contentText(message.content)} isRaw={isRaw} />}
          {(message.images ?? []).length > 0 && <Pictures images={message.images ?? []} />}
          {(message.tool_calls ?? []).map((call, number) => (
            <div class="call" key={number}>
              <b class="mono">{visible(call.function?.name ?? "?")}</b> <span class="faint">{call.id}</span>
              <Rendered text={callText(call)} isRaw={isRaw} />
            </div>
          ))}
          {message.refusal && <p class="trouble">Refused: {visible(message.refusal)}</p>}
          {below?.(at)}
        </div>
      ))}
    </div>
  );
}
