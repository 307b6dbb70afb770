"""Routes, one file a group; each exports `make_router(context)`."""
