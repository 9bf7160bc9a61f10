#include "attention/attention.h"
