import { render } from "preact";
import { App } from "./App.tsx";
import { followLinks } from "./lib/router.ts";
import "./app.css";

const place = document.getElementById("app");
if (place) {
  followLinks();
  render(<App />, place);
}
