// A model that reads images: choose or upload one or two, their patches' scores over the first, and the class that is explained.
import { card, h, largest, menu, number, tint, worded } from "./draw.js";
import { NOTHING, isPair, post } from "./state.js";

const FRESH = { ...NOTHING, query: undefined, target: undefined, minus: undefined };
const NEITHER = "";

// Takes the place of the prompt.
export function imageControls(about, state, go, fail) {
  if (!about.classes) return;
  const place = document.getElementById("modes");
  if (!place.childElementCount) build(place, about, go, fail);
  choose("given", state.image);
  choose("given-other", state.other_image);
  const second = document.getElementById("second-image");
  if (state.other_image) second.hidden = false;
  const toggle = document.getElementById("compare-images");
  toggle.hidden = !state.image;
  toggle.setAttribute("aria-expanded", String(!second.hidden));
  toggle.textContent = !second.hidden ? "One image only" : about.two_models ? "Compare the two models" : "Compare two images";
}

// A select shows the image of the state, an uploaded one too.
function choose(id, name) {
  const select = document.getElementById(id);
  select.querySelector("[data-upload]")?.remove();
  if (name && ![...select.options].some((option) => option.value === name)) select.append(h("option", { value: name, "data-upload": "" }, "Uploaded image"));
  select.value = name ?? NEITHER;
}

function build(place, about, go, fail) {
  for (const id of ["text", "compare", "second"]) document.getElementById(id).hidden = true;
  document.querySelector("label[for=text]").hidden = true;
  document.querySelector("#ask button[type=submit]").hidden = true;
  const second = h("div", { class: "row", id: "second-image", hidden: true }, picker(about, "other_image", "-other", "Compare with", go, fail),
    h("small", {}, "every view then shows the exact difference, first − second"));
  const toggle = h("button", { type: "button", id: "compare-images", class: "quiet", onclick: () => {
    second.hidden = !second.hidden;
    if (second.hidden) go({ ...FRESH, other_image: undefined });
    else go(about.two_models ? { ...FRESH, other_image: document.getElementById("given").value } : {});
  } });
  const how = about.processor ? "prepared by the model’s image processor" : "resized to the model’s size, with values of 0 to 1";
  place.classList.add("pickers");
  place.replaceChildren(
    h("div", { class: "row" }, picker(about, "image", "", "Image", go, fail), toggle), second,
    h("small", {}, `Uploads are PNG or JPEG files, ${how}; transparent parts become white.`));
}

// Chooses one image: one of those that are offered, or a file.
function picker(about, field, suffix, name, go, fail) {
  const given = h("select", { id: `given${suffix}`, "aria-label": name, onchange: (event) => go({ [field]: event.target.value || undefined, ...FRESH }) },
    h("option", { value: NEITHER }, about.images.length ? "Choose an image" : "No image yet"), about.images.map((of) => h("option", { value: of }, `Image ${of}`)));
  const upload = h("input", { type: "file", id: `upload${suffix}`, accept: "image/png,image/jpeg", "aria-label": `${name}: upload a file`, onchange: async (event) => {
    try {
      const [file] = event.target.files;
      if (!file) return;
      event.target.value = ""; // the same file may be chosen again
      go({ [field]: (await post("upload", file)).image, ...FRESH });
    } catch (refusal) { fail(refusal.message); }
  } });
  return h("span", { class: "row" }, h("b", {}, name), given, h("label", { class: "upload" }, "Upload a file", upload));
}

// The images that Python gave, to press one.
export function gallery(about, go) {
  if (!about.pictures.length) return null;
  return h("div", { class: "gallery", role: "group", "aria-label": "Images; press one to explain its class" }, about.pictures.map((picture, at) =>
    h("button", { type: "button", title: `Image ${about.images[at]}`, onclick: () => go({ image: about.images[at], ...FRESH }) },
      h("img", { src: picture, alt: `Image ${about.images[at]}` }))));
}

const figure = (says, ...body) => h("figure", {}, ...body, h("figcaption", {}, says));

export function imageView(view, prompt, state, about, go) {
  const two = isPair(state);
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
  return card("picture", two ? "Where the change comes from" : "Where on the image", worded(view.label),
    h("div", { class: "row" }, h("label", { class: "mode" }, "Explain ", classes), menu(view.label, "image", { columns: ["row", ...columns], rows }, view.code)),
    h("div", { class: "pictures" },
      figure(two ? "scores of the patches, over the first image" : "scores of the patches, over the image",
        h("div", { class: "patches", style: { "--columns": view.columns, "--rows": view.rows } },
          h("img", { src: view.greys, alt: "" }), h("div", { role: "group", "aria-label": "Scores of patches" }, patches))),
      figure(two ? "the first image, as the model reads it" : "the image, as the model reads it", h("img", { src: view.picture, alt: "The image as the model reads it" })),
      two ? figure("the second image", h("img", { src: view.second_picture, alt: "The second image as the model reads it" })) : null));
}
