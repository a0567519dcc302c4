"""Prompts of every kind that users bring, and questions whose answer stands in the prompt."""

PROMPTS = {
    "sentence": "The Eiffel Tower is in the city of",
    "question": "Why is the sky blue at noon and red in the evening?",
    "dialogue": "“I never said that,” she replied, and closed the",
    "capitals": "BREAKING NEWS: THE PRESIDENT OF FRANCE HAS",
    "typing errors": "teh qiuck brwon fox jmups ovre the lzay",
    "list": "Shopping list:\n- eggs\n- milk\n- bread\n-",
    "table": "| name | age |\n| --- | --- |\n| Ada | 36 |\n| Alan |",
    "code": "def add(a, b):\n    return a +",
    "deep code": "class Stack:\n    def pop(self):\n        if not self.items:\n            raise IndexError(",
    "C": '#include <stdio.h>\nint main(void) {\n\tprintf("%d\\n", 42);\n\treturn',
    "SQL": "SELECT name, COUNT(*) FROM users WHERE age > 18 GROUP BY",
    "shell": "$ grep -rn 'TODO' src/ | wc -l\n$ git commit -m",
    "HTML": '<ul><li><a href="https://example.org/?q=1&amp;r=2">one</a></li><li>',
    "JSON": '{"id": 7, "tags": ["a", "b"], "nested": {"x": null, "y":',
    "maths": "If 3x + 5 = 20, then x =",
    "LaTeX": "\\int_0^1 x^2 \\, dx = \\frac{1}{",
    "numbers": "1, 1, 2, 3, 5, 8, 13, 21,",
    "signs": "∀ε>0 ∃δ>0: |x−a|<δ ⇒ |f(x)−f(a)|<",
    "emoji": "I love this 😂 so much 👩‍👩‍👧 🇫🇷",
    "Chinese": "法国的首都是",
    "Japanese": "東京は日本の首都で、人口は",
    "Korean": "서울은 대한민국의",
    "Arabic": "عاصمة فرنسا هي",
    "Hebrew": "בירת צרפת היא",
    "Thai": "เมืองหลวงของฝรั่งเศสคือ",
    "Devanagari": "फ्रांस की राजधानी",
    "Russian": "Столица Франции —",
    "Greek": "Η πρωτεύουσα της Γαλλίας είναι",
    "accents": "Où est passé le garçon naïf ? Él comió jalapeños y",
    "marks of their own": "Zalgo: e\u0301\u0323\u0302 a\u0308\u030a",
    "long words": "Donaudampfschifffahrtsgesellschaftskapitän pneumonoultramicroscopicsilicovolcanoconiosis",
    "one token": "Hello",
    "one letter": "a",
    "repeated tokens": "the the the the the the the the the the the the",
    "induction": "vex lum tor pid vex lum tor",
    "blanks": "  two   spaces\t\ttabs\n\n\nlines   ",
    "special token": "An end <|endoftext|> and a start <bos> <|im_start|> in the text",
    "address": "Write to j.doe+test@mail.example.co.uk or call +44 (0)20 7946-0018 by",
    "several sentences": (
        "Ada Lovelace wrote the first program. She worked with Charles Babbage, who designed the Analytical Engine. "
        "The machine was never built, yet her notes describe how it would compute Bernoulli numbers. In her notes,"
    ),
    "chat": [
        {"role": "user", "content": "Name one animal that can fly."},
    ],
    "chat of two turns": [
        {"role": "user", "content": "My name is Kim."},
        {"role": "assistant", "content": "Hello, Kim!"},
        {"role": "user", "content": "What is my name?"},
    ],
}

KNOWN = {
    "My dog is called {other} and my cat is called {source}. My cat is called": ("Luna", "Max"),
    "When {other} and {source} went to the store, {other} gave a drink to": ("Mary", "John"),
    "Then {other} and {source} had lunch, and {other} gave a book to": ("Peter", "Anna"),
    "At the garden {other} and {source} were talking, and {other} passed a flower to": ("Jane", "Paul"),
}
"""Prompts whose answer is the source, with two names: both models follow when the names change places."""
