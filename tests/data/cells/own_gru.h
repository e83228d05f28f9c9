// The GRU once more, by another name.
#pragma once

#include "cells/gru.h"

struct OwnGru : extops::Gru {};
