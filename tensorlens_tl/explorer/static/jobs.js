// What the server is doing, with a way to stop it; and a word when the model has changed since the last answer.
import { h, plain } from "./draw.js";
import { post, stop } from "./state.js";

const PATIENCE = 400; // milliseconds before a question shows its progress
const BETWEEN = 300;
const VIEWS = { prompt: "the next tokens", mends: "the mends", tokens: "the tokens", components: "the components", head: "the head", routes: "the routes", ablate: "the ablation", graph: "the graph", neurons: "the neurons", features: "the features", feature: "the feature", generated: "the generated text", image: "the image" };
let timer;
let isNews = false; // the notice stays for the answers that it is about

const place = () => document.getElementById("progress");

export function begin() {
  if (!isNews) document.getElementById("notice").hidden = true;
  isNews = false;
  clearTimeout(timer);
  timer = setTimeout(look, PATIENCE);
}

export function end() {
  clearTimeout(timer);
  place().hidden = true;
}

async function look() {
  try {
    const { jobs } = await post("jobs", "{}");
    const running = jobs.find((job) => job.seconds !== null);
    if (running) draw(running, jobs.length - 1);
  } catch { /* the question itself says what is wrong */ }
  timer = setTimeout(look, BETWEEN);
}

function draw(job, others) {
  const share = job.share === null ? null : h("progress", { max: 1, value: job.share, "aria-label": job.what });
  const said = `Computing ${VIEWS[job.view] ?? job.view}: ${plain(job.seconds)} s${job.what ? `, ${job.what}` : ""}`;
  const waiting = others > 0 ? ` · ${others} more` : "";
  const button = place().querySelector("button") ?? h("button", { type: "button", id: "cancel", onclick: cancel }, "Cancel");
  const focused = document.activeElement === button;
  place().replaceChildren(...[h("span", {}, said + waiting), share, button].filter(Boolean));
  if (focused) button.focus();
  place().hidden = false;
}

function cancel() {
  stop();
  end();
}

addEventListener("changed", () => {
  const notice = document.getElementById("notice");
  notice.textContent = "The model has changed since the last answer; it was run again, and what you see is of the model as it is now.";
  notice.hidden = false;
  isNews = true;
});
