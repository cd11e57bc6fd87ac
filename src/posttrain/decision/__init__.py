"""The decision plane: gate rules and release channels. It decides; control acts."""
