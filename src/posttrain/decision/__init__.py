"""The decision plane: gate rules and release channels. States what should be; control actuates."""
