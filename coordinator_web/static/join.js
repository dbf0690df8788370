// The page /join: its text is there without this; here are its buttons.

import { copyButtons } from "/static/copy.js";

copyButtons();
