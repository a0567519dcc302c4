// A model that reads images: choose or upload one, its patches' scores over it, and the class that is explained.
import { card, h, largest, menu, number, tint } from "./draw.js";
import { NOTHING, post } from "./state.js";

const FRESH = { ...NOTHING, query: undefined, target: undefined, minus: undefined };

// Takes the place of the prompt.
export function imageControls(about, state, go, fail) {
  if (!about.classes) return;
  const place = document.getElementById("modes");
  if (!place.childElementCount) build(place, about, go, fail);
  const given = document.getElementById("given");
  if (given) given.value = about.images.includes(state.image) ? state.image : "";
}

function build(place, about, go, fail) {
  for (const id of ["text", "compare", "second"]) document.getElementById(id).hidden = true;
  document.querySelector("label[for=text]").hidden = true;
  document.querySelector("#ask button[type=submit]").hidden = true;
  const given = about.images.length
    ? h("select", { id: "given", "aria-label": "Image", onchange: (event) => go({ image: event.target.value || undefined, ...FRESH }) },
      h("option", { value: "" }, "Choose an image"), about.images.map((name) => h("option", { value: name }, `Image ${name}`)))
    : null;
  const upload = h("input", { type: "file", id: "upload", accept: "image/png,image/jpeg", onchange: async (event) => {
    try {
      const [file] = event.target.files;
      if (!file) return;
      event.target.value = ""; // the same file may be chosen again
      go({ image: (await post("upload", file)).image, ...FRESH });
    } catch (refusal) { fail(refusal.message); }
  } });
  const how = about.processor ? "prepared by the model’s image processor" : "resized to the model’s size, with values of 0 to 1";
  place.replaceChildren(...[given, h("label", { class: "mode" }, `Upload a PNG or JPEG, ${how}; transparent parts become white `, upload)].filter(Boolean));
}

export function imageView(view, prompt, about, go) {
  const scores = view.scores.slice(view.special);
  const most = largest(scores);
  const patches = scores.map((score, at) => {
    const name = `patch ${Math.floor(at / view.columns)},${at % view.columns}: ${number(score)}`;
    return h("span", { role: "img", "aria-label": name, title: String(score), style: tint(score, most) });
  });
  const classes = h("select", { id: "class", "aria-label": "Class that is explained", onchange: (event) => go({ target: Number(event.target.value) }) },
    about.classes.map((name, id) => h("option", { value: id, selected: id === prompt.target.id }, name)));
  const columns = Array.from({ length: view.columns }, (_, at) => String(at));
  const rows = Array.from({ length: view.rows }, (_, at) => [`row ${at}`, ...scores.slice(at * view.columns, (at + 1) * view.columns)]);
  return card("picture", "Where on the image", view.label,
    h("div", { class: "row" }, h("label", { class: "mode" }, "Explain ", classes), menu(view.label, "image", { columns: ["row", ...columns], rows }, view.code)),
    h("div", { class: "pictures" },
      h("div", { class: "patches", style: { "--columns": view.columns, "--rows": view.rows } },
        h("img", { src: view.greys, alt: "" }), h("div", { role: "group", "aria-label": "Scores of patches" }, patches)),
      h("img", { src: view.picture, alt: "The image as the model reads it" })));
}
