"""`afd bench report`: renders published numbers from records and finds those of earlier code."""
