// What pymdownx.arithmatex marks as a formula is typeset, and nothing else.
window.MathJax = {
  loader: {
    load: ["input/tex", "output/chtml", "a11y/assistive-mml"],
    paths: { fonts: "[mathjax]" },
  },
  tex: {
    packages: { "[-]": ["autoload", "noundefined", "require"] }, // an unknown command is an error
    inlineMath: [["\\(", "\\)"]],
    displayMath: [["\\[", "\\]"]],
  },
  output: { font: "mathjax-tex", scale: 0.9, displayOverflow: "scroll" },
  options: { ignoreHtmlClass: ".*|", processHtmlClass: "arithmatex" },
};
