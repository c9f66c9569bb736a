PROFILE = "profile.json"
