"""Do the settings do anything?"""
